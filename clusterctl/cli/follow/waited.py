"""Says in the live view for whom all others have waited since long, in a run that nobody calls stalled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.render.status import slow_lines
from clusterctl.run.record.sample_files import read_latest_activity
from clusterctl.run.rules.state import RunPhase

if TYPE_CHECKING:
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState

_EVERY = 10.0


class WaitedFor:
    """Looks now and then; the same ranks are named once an attempt.

    One node is looked at as long as its ranks move, which is nearly always: the others are read only where they do not.

    Args:
        run: Which run.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._looked = float("-inf")
        self._told: set[tuple[int, frozenset[int]]] = set()

    def news(self, state: RunState, now: float) -> list[str]:
        """Return what there is to say at a moment (monotonic seconds); mostly nothing."""
        if now - self._looked < _EVERY or state.phase is not RunPhase.RUNNING:
            return []
        self._looked = now
        slow = self._slow(state)
        told = (state.attempt, frozenset(slow))
        if not slow or told in self._told:
            return []
        self._told.add(told)
        return [*slow_lines(state, slow), f"hint: `clusterctl stacks {state.run}` shows where every rank is"]

    def _slow(self, state: RunState) -> dict[int, str]:
        first = state.workers.get(0)
        sample = None if first is None else read_latest_activity(self._run, first.node)
        if sample is None:
            return {}
        from clusterctl.cli.lookup.runs import held_in
        from clusterctl.run.rules import rank_timing
        from clusterctl.why.slowness import LONG_WAIT_S

        counted = any(rank_timing.get_collective_numbers(rank) for rank in (sample.get("ranks") or {}).values())
        still = counted and not rank_timing.has_recent_progress([sample], state.attempt, LONG_WAIT_S)
        return held_in(self._run, state) if still else {}
