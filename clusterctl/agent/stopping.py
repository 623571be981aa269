"""The ladder: SIGTERM and SIGCONT to every group, grace, SIGKILL, sweep until empty twice, an end in any case."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent import sweep

if TYPE_CHECKING:
    from clusterctl.agent.loop import Loop, Timer
    from clusterctl.agent.marks import Marks

_BOUND = 10.0
"""Seconds after the first SIGKILL when what is left is given up and named."""
_FASTEST, _SLOWEST = 0.01, 0.25


class Ladder:
    """One climb, for all processes of a run on this node."""

    def __init__(
        self,
        loop: Loop,
        marks: Marks,
        ledger: sweep.Ledger,
        kill_at: float,
        done: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        """Begin.

        Args:
            loop: Where it runs.
            marks: Whom to end.
            ledger: Whom to end, and whom not.
            kill_at: Monotonic time of the first SIGKILL.
            done: Called once, with what is left.
        """
        self._loop, self._marks, self._ledger, self._done = loop, marks, ledger, done
        self._kill_at = kill_at
        self._killing: float | None = None
        self._signalled: set[int] = set()
        self._empty = 0
        self._pause = _FASTEST
        self._timer: Timer | None = loop.after(0.0, self._step)
        self._over = False

    def shorten(self, kill_at: float) -> None:
        """Kill at that time, if it is before the one that was set."""
        if kill_at < self._kill_at:
            self._kill_at = kill_at
            self.poke()

    def poke(self) -> None:
        """Look again now: a process has ended."""
        if not self._over and self._timer is not None:
            self._timer.cancel()
            self._pause = _FASTEST
            self._timer = self._loop.after(_FASTEST, self._step)

    def _step(self) -> None:
        now = time.monotonic()
        found = sweep.find(self._marks, self._ledger)
        self._empty = 0 if found else self._empty + 1
        given_up = self._killing is not None and now - self._killing >= _BOUND
        if self._empty >= 2 or (found and given_up):
            self._over = True
            self._done([sweep.describe(one) for one in found])
            return
        if found and now >= self._kill_at:
            self._killing = now if self._killing is None else self._killing
            sweep.kill(found, self._ledger)
        elif found:
            sweep.end_groups(found, self._signalled)
        self._pause = min(self._pause * 1.5, _SLOWEST) if found else _FASTEST
        wait = self._pause if self._killing is not None else min(self._pause, max(self._kill_at - now, 0.0))
        self._timer = self._loop.after(wait, self._step)
