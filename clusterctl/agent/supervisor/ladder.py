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

_BOUND = 10.0
"""Seconds after the first SIGKILL when what is left is given up and named, unless the kernel is at work on its end."""
_LONGEST = 600.0
"""Seconds that the kernel may take: hundreds of GB of pinned memory are not given back in less than minutes."""
_FASTEST, _SLOWEST = 0.01, 0.25
_HOLD_STEP_SECONDS = 0.05
_SCAN_SECONDS = 1.0
"""How often all processes are looked at while nothing but the grace is waited for."""
_SHARE = 4
"""A look at all processes is followed by a pause of at least this many times what it took."""


class Ladder:
    """One climb, for all processes of a run on this node."""

    def __init__(
        self,
        loop: EventLoop,
        markers: RunMarkers,
        known_processes: run_processes.KnownProcesses,
        kill_at: float,
        done: Callable[[list[SurvivingProcess]], bool],
        slow: Callable[[list[ProcessStat]], None],
        *,
        hold_s: float = 0.0,
        late: Callable[[list[ProcessStat], bool], None] = lambda _found, _killed: None,
    ) -> None:
        """Begin.

        Args:
            loop: Where it runs.
            markers: Whom to end.
            known_processes: Whom to end, and whom not.
            kill_at: Monotonic time of the first SIGKILL. If that is ahead, the stop signal comes first and the time
                until then is counted from there: to look at all processes may take longer than the grace.
            done: Called with what is left, again until it says that this was the end.
            slow: Called once with what the kernel has not taken apart in the time in which it should be gone.
            hold_s: For so long what is left may end by itself before anything is sent.
            late: Called with what has not ended in `hold_s`, and with true for what has not ended in its whole grace.
        """
        self._loop, self._markers, self._known_processes, self._done, self._slow = (
            loop,
            markers,
            known_processes,
            done,
            slow,
        )
        self._kill_at, self._late = kill_at, late
        now = time.monotonic()
        self._hold_until: float | None = now + hold_s if hold_s else None
        self._has_whole_grace = kill_at > now
        self._unasked_since = now if kill_at > now else None
        self._killing: float | None = None
        self._moved = 0.0
        self._said_slow = False
        self._signalled: set[int] = set()
        self._empty = 0
        self._pause = _FASTEST
        self._scan_at = 0.0
        self._left: list[SurvivingProcess] | None = None
        self._over = False
        self._timer: Timer = loop.after(0.0, self._step)

    def shorten(self, kill_at: float) -> None:
        """Kill at that time, if it is before the one that was set."""
        if kill_at < self._kill_at:
            self._kill_at, self._unasked_since, self._hold_until = kill_at, None, None
            self._has_whole_grace = False
            self.poke()

    def poke(self) -> None:
        """Look again now: a process has ended."""
        if not self._over:
            self._pause = _FASTEST
            self._next(_FASTEST)

    def _next(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.after(seconds, self._step)

    def _step(self) -> None:
        # Should this step fail, there has to be another.
        self._next(_SLOWEST)
        wait = _FASTEST if self._left is not None else self._climb()
        self._over = self._left is not None and self._done(self._left)
        if self._over:
            self._timer.cancel()
        else:
            self._next(wait)

    def _climb(self) -> float:
        """Signal what is left, or find that this is the end; return the seconds until the next step."""
        living = self._look()
        now = time.monotonic()
        if self._empty >= 2 or (living and self._given_up(living, now)):
            self._left = run_processes.describe_survivors(living)
            return _FASTEST
        if living and self._hold_until is not None:
            if now < self._hold_until:
                return _HOLD_STEP_SECONDS
            self._hold_until = None
            self._late(living, False)
        if living and self._unasked_since is not None:
            self._kill_at += now - self._unasked_since
            self._unasked_since = None
        if living and now >= self._kill_at:
            if self._killing is None and self._has_whole_grace:
                self._late(living, True)
            self._killing = now if self._killing is None else self._killing
            run_processes.kill_processes(living, self._known_processes)
        elif living:
            run_processes.terminate_groups(living, self._signalled, self._known_processes)
        self._pause = (
            min(self._pause * 1.5, _SLOWEST) if living or self._known_processes.is_scan_incomplete else _FASTEST
        )
        return self._pause if self._killing is not None else min(self._pause, max(self._kill_at - now, 0.0))

    def _look(self) -> list[ProcessStat]:
        """Return what is left: of those that are known, and, where there are none or it is time, of all processes."""
        began = time.monotonic()
        living = run_processes.list_known_processes(self._known_processes)
        if living and began < self._scan_at:
            self._empty = 0
            return living
        members = run_processes.find_run_processes(self._markers, self._known_processes)
        now = time.monotonic()
        pause = _SCAN_SECONDS if self._killing is None else self._pause
        self._scan_at = now + max(pause, _SHARE * (now - began))
        self._empty = 0 if members or self._known_processes.is_scan_incomplete else self._empty + 1
        return members

    def _given_up(self, found: list[ProcessStat], now: float) -> bool:
        """Whether what is left will not go: nothing has moved for long."""
        if self._killing is None:
            return False
        if all(proc.is_exiting_unblocked(one) for one in found):
            self._moved = now
            if not self._said_slow and now - self._killing >= _BOUND:
                self._said_slow = True
                self._slow(found)
        return now - max(self._killing, self._moved) >= _BOUND or now - self._killing >= _LONGEST


def enforce(
    run: RunDir, markers: RunMarkers, attempt: int, known_processes: run_processes.KnownProcesses, grace: float
) -> dict[str, Any]:
    """End everything of a run here; done aside by a waiter whose fence has expired."""
    fencing.write_fence(run.fence(attempt))
    known_processes.protected |= supervisor_lookup.list_supervisor_and_waiters(run)
    secrets.remove_secrets(run)
    return {"left": end_all(markers, known_processes, grace)}


def end_all(markers: RunMarkers, known_processes: run_processes.KnownProcesses, grace: float) -> list[SurvivingProcess]:
    """Do the whole ladder and wait for it, for who has nothing else to do; return what is left."""
    loop = EventLoop()
    left: list[SurvivingProcess] = []

    def done(remaining: list[SurvivingProcess]) -> bool:
        left.extend(remaining)
        loop.stop()
        return True

    Ladder(loop, markers, known_processes, time.monotonic() + grace, done, lambda _found: None)
    loop.run()
    return left
