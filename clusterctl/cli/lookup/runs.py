"""A run as the reading commands show it: state, activity and whether it is attended, from files alone."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.files import index_file, output_file
from clusterctl.render.status import RunView, WorkerActivity, activity_from_sample
from clusterctl.run.record import find, origin, outline, samples

if TYPE_CHECKING:
    from clusterctl.render.terminal.console import Console
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


def tell_unread(state: RunState, console: Console) -> None:
    """Name the first line of each file of a run that could not be read; what else there is was read."""
    for line in state.unread:
        console.narrate(f"warning: {state.run}: {line}; what cannot be read is left out")


def view_of(run: RunDir) -> RunView:
    """Return what is known of a run now."""
    state, attended = find.visible_state(run)
    return view_from(run, state, attended=attended)


def listed_view_of(run: RunDir) -> RunView:
    """Return what lists show of a run now; of one that has ended only its outline is read, where there is one."""
    end = outline.read(run.outline, run.events)
    if end is None:
        return view_of(run)
    return RunView(state=end.state, attended=run.attended, activity={0: WorkerActivity(step=end.step)})


def view_from(run: RunDir, state: RunState, *, attended: bool) -> RunView:
    """Return what is known of a run whose state has been read already."""
    where: list[str] = []
    if state.stall is not None and state.stall.phase == "confirmed":
        from clusterctl.cli.lookup.stalled import where_ranks_are

        where = where_ranks_are(run, state)
    return RunView(
        state=_with_stall_age(state),
        attended=attended,
        activity=_activity(run, state),
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


def _activity(run: RunDir, state: RunState) -> dict[int, WorkerActivity]:
    now = time.time()
    sampled: dict[int, WorkerActivity] = {}
    for node in state.nodes:
        sample = samples.latest_activity(run, node)
        if sample is not None and sample.get("attempt") == state.attempt:
            sampled |= activity_from_sample(sample, max(0.0, now - float(sample.get("t") or now)))
    folders = {node: os.fspath(run.node(node)) for node in state.nodes}
    return {
        rank: _with_output_age(folders[worker.node], state.attempt, rank, sampled.get(rank), now)
        for rank, worker in state.workers.items()
    }


def _with_output_age(
    folder: str, attempt: int, rank: int, sampled: WorkerActivity | None, now: float
) -> WorkerActivity:
    activity = sampled or WorkerActivity()
    written = [_written(f"{folder}/{file}") for file in (output_file(attempt, rank), index_file(attempt, rank))]
    if not any(written):
        return activity
    age = max(0.0, now - max(written))
    return WorkerActivity(step=activity.step, last_output_s=age, last_progress_s=activity.last_progress_s)


def _written(path: str) -> float:
    """Return when a file was last written; 0 where there is none."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
