"""The ladder: stop signal and SIGCONT to every group, grace, SIGKILL, sweep until empty twice, an end in any case."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.event_loop import EventLoop
from clusterctl.agent.node_state import fencing, secrets
from clusterctl.agent.processes import run_processes, supervisor_lookup

if TYPE_CHECKING:
    from clusterctl.agent.linux.event_loop import Timer
    from clusterctl.agent.linux.proc import ProcessStat
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.processes.run_markers import RunMarkers
    from clusterctl.agent.protocol.process_types import SurvivingProcess

_GIVE_UP_AFTER_S = 10.0
"""Seconds after the first SIGKILL when what is left is given up and named, unless the kernel is at work on its end."""
_MAX_KERNEL_TIME_S = 600.0
"""Seconds that the kernel may take: hundreds of GB of pinned memory are not given back in less than minutes."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.01, 0.25
_HOLD_STEP_S = 0.05
_SCAN_INTERVAL_S = 1.0
"""How often all processes are looked at while nothing but the grace is waited for."""
_PAUSE_PER_SCAN_TIME = 4
"""A look at all processes is followed by a pause of at least this many times what it took."""


class Terminator:
    """One climb, for all processes of a run on this node."""

    def __init__(
        self,
        loop: EventLoop,
        markers: RunMarkers,
        known_processes: run_processes.KnownProcesses,
        kill_at: float,
        on_done: Callable[[list[SurvivingProcess]], bool],
        on_slow: Callable[[list[ProcessStat]], None],
        *,
        hold_s: float = 0.0,
        on_late: Callable[[list[ProcessStat], bool], None] = lambda _found, _killed: None,
    ) -> None:
        """Begin.

        Args:
            loop: Where it runs.
            markers: Whom to end.
            known_processes: Whom to end, and whom not.
            kill_at: Monotonic time of the first SIGKILL. If that is ahead, the stop signal comes first and the time
                until then is counted from there: to look at all processes may take longer than the grace.
            on_done: Called with what is left, again until it says that this was the end.
            on_slow: Called once with what the kernel has not taken apart in the time in which it should be gone.
            hold_s: For so long what is left may end by itself before anything is sent.
            on_late: Called with the processes that outlived `hold_s`, and with true for those that outlived the grace.
        """
        self._loop, self._markers, self._known_processes, self._on_done, self._on_slow = (
            loop,
            markers,
            known_processes,
            on_done,
            on_slow,
        )
        self._kill_at, self._on_late = kill_at, on_late
        now = time.monotonic()
        self._hold_until: float | None = now + hold_s if hold_s else None
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
        self._timer: Timer = loop.after(0.0, self._step)

    def shorten(self, kill_at: float) -> None:
        """Kill at that time, if it is before the one that was set."""
        if kill_at < self._kill_at:
            self._kill_at, self._grace_pending_since, self._hold_until = kill_at, None, None
            self._has_whole_grace = False
            self.check_now()

    def check_now(self) -> None:
        """Look again now: a process has ended."""
        if not self._is_over:
            self._pause = _MIN_PAUSE_S
            self._schedule_step(_MIN_PAUSE_S)

    def _schedule_step(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.after(seconds, self._step)

    def _step(self) -> None:
        # Should this step fail, there has to be another.
        self._schedule_step(_MAX_PAUSE_S)
        wait = _MIN_PAUSE_S if self._survivors is not None else self._signal_processes()
        self._is_over = self._survivors is not None and self._on_done(self._survivors)
        if self._is_over:
            self._timer.cancel()
        else:
            self._schedule_step(wait)

    def _signal_processes(self) -> float:
        """Signal what is left, or find that this is the end; return the seconds until the next step."""
        remaining = self._list_remaining()
        now = time.monotonic()
        if self._empty_scans >= 2 or (remaining and self._is_given_up(remaining, now)):
            self._survivors = run_processes.describe_survivors(remaining)
            return _MIN_PAUSE_S
        if remaining and self._hold_until is not None:
            if now < self._hold_until:
                return _HOLD_STEP_S
            self._hold_until = None
            self._on_late(remaining, False)
        if remaining and self._grace_pending_since is not None:
            self._kill_at += now - self._grace_pending_since
            self._grace_pending_since = None
        if remaining and now >= self._kill_at:
            if self._killed_at is None and self._has_whole_grace:
                self._on_late(remaining, True)
            self._killed_at = now if self._killed_at is None else self._killed_at
            run_processes.kill_processes(remaining, self._known_processes)
        elif remaining:
            run_processes.terminate_groups(remaining, self._signalled, self._known_processes)
        self._pause = (
            min(self._pause * 1.5, _MAX_PAUSE_S)
            if remaining or self._known_processes.is_scan_incomplete
            else _MIN_PAUSE_S
        )
        return self._pause if self._killed_at is not None else min(self._pause, max(self._kill_at - now, 0.0))

    def _list_remaining(self) -> list[ProcessStat]:
        """Return what is left: of those that are known, and, where there are none or it is time, of all processes."""
        began = time.monotonic()
        remaining = run_processes.list_known_processes(self._known_processes)
        if remaining and began < self._scan_at:
            self._empty_scans = 0
            return remaining
        members = run_processes.find_run_processes(self._markers, self._known_processes)
        now = time.monotonic()
        pause = _SCAN_INTERVAL_S if self._killed_at is None else self._pause
        self._scan_at = now + max(pause, _PAUSE_PER_SCAN_TIME * (now - began))
        self._empty_scans = 0 if members or self._known_processes.is_scan_incomplete else self._empty_scans + 1
        return members

    def _is_given_up(self, found: list[ProcessStat], now: float) -> bool:
        """Whether what is left will not go: nothing has moved for long."""
        if self._killed_at is None:
            return False
        if all(proc.is_exiting_unblocked(one) for one in found):
            self._progress_at = now
            if not self._has_reported_slow and now - self._killed_at >= _GIVE_UP_AFTER_S:
                self._has_reported_slow = True
                self._on_slow(found)
        return (
            now - max(self._killed_at, self._progress_at) >= _GIVE_UP_AFTER_S
            or now - self._killed_at >= _MAX_KERNEL_TIME_S
        )


def terminate_for_fence(
    run: RunDir, markers: RunMarkers, attempt: int, known_processes: run_processes.KnownProcesses, grace: float
) -> dict[str, Any]:
    """End everything of a run here; done aside by a waiter whose fence has expired."""
    fencing.write_fence(run.fence(attempt))
    known_processes.protected |= supervisor_lookup.list_supervisor_and_waiters(run)
    secrets.remove_secrets(run)
    return {"left": terminate_and_wait(markers, known_processes, grace)}


def terminate_and_wait(
    markers: RunMarkers, known_processes: run_processes.KnownProcesses, grace: float
) -> list[SurvivingProcess]:
    """Do the whole ladder and wait for it, for who has nothing else to do; return what is left."""
    loop = EventLoop()
    survivors: list[SurvivingProcess] = []

    def done(remaining: list[SurvivingProcess]) -> bool:
        survivors.extend(remaining)
        loop.stop()
        return True

    Terminator(loop, markers, known_processes, time.monotonic() + grace, done, lambda _found: None)
    loop.run()
    return survivors
