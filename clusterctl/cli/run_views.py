"""Views of a run for the commands that read runs: state, activity and controller, from files alone."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.evidence_files import list_stall_folders
from clusterctl.agent.protocol.record_types import ActivitySample
from clusterctl.agent.protocol.run_files import SAMPLES_FILE, format_index_path, format_output_path
from clusterctl.render.run_messages import Unattended, predict_unattended
from clusterctl.render.stacks import summarize_stacks
from clusterctl.render.status import RunView, WorkerActivity, activity_from_sample
from clusterctl.run.record import run_facts, sample_files, state_reader
from clusterctl.run.record.rundir import RunDir, read_saved_verdict
from clusterctl.run.record.saved_verdict import read_evidence
from clusterctl.run.rules import rank_timing, why_evidence
from clusterctl.run.rules.policy import Limits
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.why import slowness
from clusterctl.why.slowness import LONG_WAIT_S, find_stragglers

if TYPE_CHECKING:
    from clusterctl.render.console import Console

_RECENT_BYTES, _FEW = 256 << 10, 8
"""Of each node's samples: `status` is asked often, and a run may have many nodes."""
_NOTHING_SEEN = WorkerActivity()


def warn_of_unreadable_lines(state: RunState, console: Console) -> None:
    """Name the first line of each file of a run that could not be read; what else there is was read."""
    for line in state.unreadable_lines:
        console.narrate(f"warning: {state.run}: {line}; what cannot be read is left out")


def add_stragglers(run: RunDir, view: RunView, newest: Mapping[str, ActivitySample]) -> RunView:
    """Return a view that names the ranks for which the others wait again and again, with the likely reason.

    Args:
        run: Which.
        view: What else is known of it.
        newest: The newest samples of ranks, by node.
    """
    state = view.state
    if state.phase is not RunPhase.RUNNING:
        return view
    if not rank_timing.has_recent_progress(newest.values(), state.attempt, LONG_WAIT_S) and (
        slow := find_blocking_ranks(run, state)
    ):
        return replace(view, slow=slow)
    if not rank_timing.are_all_counted(newest.values()):
        return view
    # One after the other: the ends of all of them together are tens of megabytes.
    ends = ((last, _end(run, node)) for node, last in newest.items())
    among = find_stragglers(rank_timing.measure_wait_shares(ends, state.attempt))
    return replace(view, slow=_reasons(view, among, {n: _end(run, n) for n in newest})) if among else view


def _end(run: RunDir, node: str) -> list[bytes]:
    return sample_files.read_last_lines(run.node(node) / SAMPLES_FILE, _RECENT_BYTES)


def find_blocking_ranks(run: RunDir, state: RunState) -> dict[int, str]:
    """Return for whom all others have waited since long, and what it does."""
    standing = rank_timing.find_idle_ranks(sample_files.read_newest_lines(run, state, _RECENT_BYTES), state.attempt)
    return {rank: standing[rank].activity for rank in slowness.find_blocking_ranks(standing, len(state.workers))}


def _reasons(view: RunView, slow: Sequence[int], ends: Mapping[str, Sequence[bytes]]) -> dict[int, str]:
    state = view.state
    known = rank_timing.measure_rank_timings(ends, state.attempt, max_lines=_FEW)
    troubles = {node: tuple(t.message for (n, _, _), t in state.troubles.items() if n == node) for node in state.nodes}
    return {
        rank: slowness.describe_reason(known, rank, troubles[state.workers[rank].node]) if {rank} < known.keys() else ""
        for rank in slow
    }


def load_brief_view(run: RunDir) -> RunView:
    """Return what `view_from` does, but not where a run comes from, what its ranks write, and where they stand."""
    state, attended = state_reader.load_visible_state(run)
    seen = _sampled(state, sample_files.read_newest_activity(run, state), time.time())
    return RunView(
        state=_with_stall_age(state),
        attended=attended,
        activity=seen,
        verdict=_verdict(run, state),
        unattended=predict_fate(run, state, attended=attended),
    )


def load_list_view(run: RunDir) -> RunView:
    """Return what lists show of a run now; of one that has ended only its summary is read, where there is one."""
    end = state_reader.read_summary(run.summary, run.events)
    if end is None:
        return load_brief_view(run)
    return RunView(state=end.state, attended=run.is_attended, activity={0: WorkerActivity(step=end.step)})


def build_run_view(
    run: RunDir,
    state: RunState,
    *,
    attended: bool,
    newest: Mapping[str, ActivitySample] | None = None,
    outputs: bool = True,
) -> RunView:
    """Return what is known of a run whose state has been read already.

    Args:
        run: Which.
        state: As it was read.
        attended: A controller is alive.
        newest: The newest samples of ranks, by node, where they have been read already.
        outputs: Look when each rank wrote something last: there are two files of each.
    """
    where: list[str] = []
    if state.stall is not None and state.stall.phase == "confirmed":
        where = describe_stalled_ranks(run, state)
    return RunView(
        state=_with_stall_age(state),
        attended=attended,
        activity=_activity(run, state, newest, outputs=outputs),
        verdict=_verdict(run, state),
        origin=run_facts.read_origin(run),
        where=where,
        unattended=predict_fate(run, state, attended=attended),
    )


def build_report_view(run: RunDir, state: RunState, *, attended: bool, step: int | None) -> RunView:
    """Return what a page tells of a run: nothing of what its ranks do now but the step that the slowest has reached."""
    return RunView(
        state=_with_stall_age(state),
        attended=attended,
        activity={0: WorkerActivity(step=step)},
        origin=run_facts.read_origin(run),
    )


def predict_fate(run: RunDir, state: RunState, *, attended: bool = False) -> Unattended:
    """Return what becomes of a run that no controller follows, from its file and the last sign of one."""
    if attended or state.over:
        return Unattended()
    # Without a readable spec the fate is unknown. Two numbers are enough: to validate all of it would import pydantic.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        stored = json.loads(run.spec.read_text())
        limits, last = Limits(stop_after=stored["stop_after"], grace=stored["job"]["grace"]), run.find_last_write_time()
        return predict_unattended(state.phase, time.time() - (last or 0.0), limits.stop_after, limits.fence)
    return Unattended()


def _verdict(run: RunDir, state: RunState) -> dict[str, Any] | None:
    """Return what the evidence of a stall that goes on told."""
    if state.stall is None or state.stall.phase != "confirmed":
        return None
    return read_saved_verdict(run)


def _with_stall_age(state: RunState) -> RunState:
    """Let the age of a stall grow: the journal holds what it was when the rule changed its mind."""
    if state.stall is None or state.reason is not None or state.over:
        return state
    grown = state.stall.at_time(time.time())
    return replace(state, stall=replace(grown, since_s=round(grown.since_s, 1)))


def _activity(
    run: RunDir, state: RunState, newest: Mapping[str, ActivitySample] | None, *, outputs: bool
) -> dict[int, WorkerActivity]:
    now = time.time()
    sampled = _sampled(state, sample_files.read_newest_activity(run, state) if newest is None else newest, now)
    if not outputs:
        return {rank: sampled.get(rank, _NOTHING_SEEN) for rank in state.workers}
    folders = {node: str(run.node(node)) for node in state.nodes}
    return {
        rank: _with_output_age(folders.get(worker.node), state.attempt, rank, sampled.get(rank), now)
        for rank, worker in state.workers.items()
    }


def _sampled(state: RunState, newest: Mapping[str, ActivitySample], now: float) -> dict[int, WorkerActivity]:
    found: dict[int, WorkerActivity] = {}
    for sample in newest.values():
        if sample.get("attempt") == state.attempt:
            found |= activity_from_sample(sample, max(0.0, now - float(sample.get("t") or now)))
    return found


def _with_output_age(
    folder: str | None, attempt: int, rank: int, sampled: WorkerActivity | None, now: float
) -> WorkerActivity:
    activity = sampled or _NOTHING_SEEN
    names = () if folder is None else (format_output_path(attempt, rank), format_index_path(attempt, rank))
    written = max((_written(f"{folder}/{name}") for name in names), default=0.0)
    return replace(activity, last_output_s=max(0.0, now - written)) if written else activity


def _written(path: str) -> float:
    """Return when a file was written last; 0 where there is none."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def describe_stalled_ranks(run: RunDir, state: RunState) -> list[str]:
    """Return a few lines that say where which ranks are; nothing while no evidence is there."""
    nodes = {rank: worker.node for rank, worker in state.workers.items()}
    for name in reversed(list_stall_folders(str(run.path))):
        if found := read_evidence(run.path / name):
            with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
                return summarize_stacks(why_evidence.fold_stacks(why_evidence.parse_rank_stacks(found)), nodes)
    return []
