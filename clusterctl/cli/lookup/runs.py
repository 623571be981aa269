"""A run as the reading commands show it: state, activity and whether it is attended, from files alone."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.files import index_file, output_file
from clusterctl.render.status import RunView, WorkerActivity, activity_from_sample
from clusterctl.run.record import find, origin, outline, samples
from clusterctl.run.rules.state import RunPhase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.protocol.types.samples import Activity
    from clusterctl.render.terminal.console import Console
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


_RECENT_BYTES, _FEW = 256 << 10, 8
"""Of each node's samples: `status` is asked often, and a run may have many nodes."""


def tell_unread(state: RunState, console: Console) -> None:
    """Name the first line of each file of a run that could not be read; what else there is was read."""
    for line in state.unread:
        console.narrate(f"warning: {state.run}: {line}; what cannot be read is left out")


def view_of(run: RunDir) -> RunView:
    """Return what is known of a run now."""
    state, attended = find.visible_state(run)
    return view_from(run, state, attended=attended)


def with_pace(run: RunDir, view: RunView) -> RunView:
    """Return a view that names the ranks for which the others wait again and again, with the likely reason."""
    from clusterctl.run.record.samples import newest_lines
    from clusterctl.run.rules.stalls import counted, paces
    from clusterctl.why.slow import held, pace

    state = view.state
    if state.phase is not RunPhase.RUNNING:
        return view
    lines = newest_lines(run, state, _RECENT_BYTES)
    standing = counted.standing(lines, state.attempt)
    if found := held.holding(standing, len(state.workers)):
        return replace(view, slow={rank: standing[rank].does for rank in found})
    known = paces.paces_of(lines, state.attempt, most=_FEW)
    slow = pace.slow_ranks(known)
    troubles = {node: tuple(t.message for (n, _, _), t in state.troubles.items() if n == node) for node in state.nodes}
    return replace(view, slow={rank: pace.reason(known, rank, troubles[state.workers[rank].node]) for rank in slow})


def listed_view_of(run: RunDir) -> RunView:
    """Return what lists show of a run now; of one that has ended only its outline is read, where there is one."""
    end = outline.read(run.outline, run.events)
    if end is None:
        return view_of(run)
    return RunView(state=end.state, attended=run.attended, activity={0: WorkerActivity(step=end.step)})


def view_from(run: RunDir, state: RunState, *, attended: bool, newest: Mapping[str, Activity] | None = None) -> RunView:
    """Return what is known of a run whose state has been read already.

    Args:
        run: Which.
        state: As it was read.
        attended: A controller is alive.
        newest: The newest samples of ranks, by node, where they have been read already.
    """
    where: list[str] = []
    if state.stall is not None and state.stall.phase == "confirmed":
        from clusterctl.cli.lookup.stalled import where_ranks_are

        where = where_ranks_are(run, state)
    return RunView(
        state=_with_stall_age(state),
        attended=attended,
        activity=_activity(run, state, newest),
        verdict=_verdict(run, state),
        origin=origin.read(run),
        where=where,
    )


def _verdict(run: RunDir, state: RunState) -> dict[str, Any] | None:
    """Return what the evidence of a stall that goes on told."""
    if state.stall is None or state.stall.phase != "confirmed":
        return None
    from clusterctl.run.record.kept.verdict import kept_json

    return kept_json(run)


def _with_stall_age(state: RunState) -> RunState:
    """Let the age of a stall grow: the journal holds what it was when the rule changed its mind."""
    if state.stall is None or state.over:
        return state
    grown = max(0.0, time.time() - state.stall.at)
    return replace(state, stall=replace(state.stall, since_s=round(state.stall.since_s + grown, 1)))


def _activity(run: RunDir, state: RunState, newest: Mapping[str, Activity] | None) -> dict[int, WorkerActivity]:
    now = time.time()
    sampled: dict[int, WorkerActivity] = {}
    for node in state.nodes:
        sample = samples.latest_activity(run, node) if newest is None else newest.get(node)
        if sample is not None and sample.get("attempt") == state.attempt:
            sampled |= activity_from_sample(sample, max(0.0, now - float(sample.get("t") or now)))
    folders = {node: str(run.node(node)) for node in state.nodes}
    return {
        rank: _with_output_age(folders.get(worker.node), state.attempt, rank, sampled.get(rank), now)
        for rank, worker in state.workers.items()
    }


def _with_output_age(
    folder: str | None, attempt: int, rank: int, sampled: WorkerActivity | None, now: float
) -> WorkerActivity:
    activity = sampled or WorkerActivity()
    names = () if folder is None else (output_file(attempt, rank), index_file(attempt, rank))
    written = max((_written(f"{folder}/{name}") for name in names), default=0.0)
    return replace(activity, last_output_s=max(0.0, now - written)) if written else activity


def _written(path: str) -> float:
    """Return when a file was written last; 0 where there is none."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
