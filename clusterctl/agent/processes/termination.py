"""Termination of all processes of a run: stop signal and SIGCONT to every group, then a grace, then SIGKILL.

The termination is over when two scans in a row find no process, or when processes survive SIGKILL for too long.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.event_loop import EventLoop
from clusterctl.agent.node_state import fencing, run_dir, secrets
from clusterctl.agent.processes import run_processes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.linux.event_loop import Timer
    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.linux.proc import ProcessStat
    from clusterctl.agent.processes.run_processes import RunMarkers
    from clusterctl.agent.protocol.record_types import SurvivingProcess

_GIVE_UP_AFTER_S = 10.0
"""The termination gives up this many seconds after the first SIGKILL, unless the kernel is still ending processes."""
_MAX_KERNEL_TIME_S = 600.0
"""Maximum seconds for the kernel to end a process. The kernel frees hundreds of GB of pinned memory in minutes."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.01, 0.25
_WAIT_STEP_S = 0.05
_SCAN_INTERVAL_S = 1.0
"""Interval in seconds between scans of all processes during the grace."""
_PAUSE_PER_SCAN_TIME = 4
"""The pause after a scan is at least this many times the duration of the scan."""


class Terminator:
    """One termination of all processes of a run on this node."""

    def __init__(
        self,
        loop: EventLoop,
        markers: RunMarkers,
        known_processes: run_processes.KnownProcesses,
        kill_at: float,
        on_done: Callable[[list[SurvivingProcess]], bool],
        on_slow: Callable[[list[ProcessStat]], None],
        *,
        wait_before_signal_s: float = 0.0,
        on_leftovers: Callable[[list[ProcessStat], bool], None] = lambda _found, _killed: None,
    ) -> None:
        """Make a termination and schedule its first step.

        Args:
            loop: The event loop that runs the steps.
            markers: Markers of the run.
            known_processes: Processes of the run, and processes that must not be signalled.
            kill_at: Monotonic time of the first SIGKILL. If `kill_at` is in the future, the stop signal comes first,
                and SIGKILL comes later by the duration of the first scan.
            on_done: Called with the survivors at the end, and called again at intervals until it returns true.
            on_slow: Called once with the processes that the kernel has not ended 10 s after SIGKILL.
            wait_before_signal_s: Seconds in which processes may end without any signal.
            on_leftovers: Called with the processes that outlived `wait_before_signal_s`, and `False`. Called again with
                the processes that outlived the grace, and `True`.
        """
        self._loop, self._markers, self._known_processes = loop, markers, known_processes
        self._on_done, self._on_slow, self._on_leftovers = on_done, on_slow, on_leftovers
        self._kill_at = kill_at
        now = time.monotonic()
        self._signal_after: float | None = now + wait_before_signal_s if wait_before_signal_s else None
        self._has_whole_grace = kill_at > now
        self._grace_pending_since = now if kill_at > now else None
        self._killed_at: float | None = None
        self._progress_at = 0.0
        self._has_reported_slow = False
        self._signalled: set[int] = set()
        self._empty_scans = 0
        self._pause = _MIN_PAUSE_S
        self._scan_at = 0.0
        self._survivors: list[SurvivingProcess] | None = None
        self._is_over = False
        self._timer: Timer = loop.call_later(0.0, self._step)

    def shorten_grace(self, kill_at: float) -> None:
        """Move SIGKILL to `kill_at` if this is earlier."""
        if kill_at < self._kill_at:
            self._kill_at, self._grace_pending_since, self._signal_after = kill_at, None, None
            self._has_whole_grace = False
            self.run_next_step()

    def run_next_step(self) -> None:
        """Run the next step early, because a process has ended."""
        if not self._is_over:
            self._pause = _MIN_PAUSE_S
            self._schedule_step(_MIN_PAUSE_S)

    def _schedule_step(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._step)

    def _step(self) -> None:
        # If this step raises an exception, the next step still runs.
        self._schedule_step(_MAX_PAUSE_S)
        wait = _MIN_PAUSE_S if self._survivors is not None else self._signal_processes()
        self._is_over = self._survivors is not None and self._on_done(self._survivors)
        if self._is_over:
            self._timer.cancel()
        else:
            self._schedule_step(wait)

    def _signal_processes(self) -> float:
        """Signal the remaining processes; at the end, set `_survivors`. Return the seconds until the next step."""
        remaining = self._list_remaining()
        now = time.monotonic()
        if self._empty_scans >= 2 or (remaining and self._must_give_up(remaining, now)):
            self._survivors = run_processes.describe_survivors(remaining)
            return _MIN_PAUSE_S
        if remaining and self._signal_after is not None:
            if now < self._signal_after:
                return _WAIT_STEP_S
            self._signal_after = None
            self._on_leftovers(remaining, False)
        if remaining and self._grace_pending_since is not None:
            self._kill_at += now - self._grace_pending_since
            self._grace_pending_since = None
        if remaining and now >= self._kill_at:
            if self._killed_at is None and self._has_whole_grace:
                self._on_leftovers(remaining, True)
            self._killed_at = self._killed_at or now
            run_processes.kill_processes(remaining, self._known_processes)
        elif remaining:
            run_processes.terminate_groups(remaining, self._signalled, self._known_processes)
        must_wait = bool(remaining) or self._known_processes.is_scan_incomplete
        self._pause = min(self._pause * 1.5, _MAX_PAUSE_S) if must_wait else _MIN_PAUSE_S
        return self._pause if self._killed_at is not None else min(self._pause, max(self._kill_at - now, 0.0))

    def _list_remaining(self) -> list[ProcessStat]:
        """Return the living known processes, or the result of a full scan if none of them lives or a scan is due."""
        scan_began = time.monotonic()
        remaining = run_processes.list_known_processes(self._known_processes)
        if remaining and scan_began < self._scan_at:
            self._empty_scans = 0
            return remaining
        members = run_processes.find_run_processes(self._markers, self._known_processes)
        now = time.monotonic()
        pause = _SCAN_INTERVAL_S if self._killed_at is None else self._pause
        self._scan_at = now + max(pause, _PAUSE_PER_SCAN_TIME * (now - scan_began))
        self._empty_scans = 0 if members or self._known_processes.is_scan_incomplete else self._empty_scans + 1
        return members

    def _must_give_up(self, found: list[ProcessStat], now: float) -> bool:
        """Return whether the remaining processes have survived SIGKILL for too long."""
        if self._killed_at is None:
            return False
        if all(proc.is_exiting_unblocked(process) for process in found):
            self._progress_at = now
            if not self._has_reported_slow and now - self._killed_at >= _GIVE_UP_AFTER_S:
                self._has_reported_slow = True
                self._on_slow(found)
        return (
            now - max(self._killed_at, self._progress_at) >= _GIVE_UP_AFTER_S
            or now - self._killed_at >= _MAX_KERNEL_TIME_S
        )


def terminate_for_fence(fence: Mapping[str, Any], _out: HelperOutput) -> dict[str, Any]:
    """End all processes of a run on this node. A waiter whose fence has expired calls this in a child process.

    Args:
        fence: Names of run and attempt, with the grace, stop signal and cgroup to use (`WaiterConfig.fence`).
    """
    run = run_dir.RunDir(fence["root"], fence["run"], fence["node"])
    fencing.write_fence_file(run.fence_file(fence["attempt"]))
    protected = run_processes.list_supervisor_and_waiters(run)
    secrets.remove_secrets(run)
    known_processes = run_processes.KnownProcesses(
        protected=protected, cgroup=fence["cgroup"], stop_signal=fence["stop_signal"]
    )
    loop = EventLoop()

    def finish(_survivors: list[SurvivingProcess]) -> bool:
        loop.stop()
        return True

    kill_at = time.monotonic() + fence["grace"]
    Terminator(loop, run_processes.make_run_markers(run), known_processes, kill_at, finish, lambda _found: None)
    loop.run()
    return {}
