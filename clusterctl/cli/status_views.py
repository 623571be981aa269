"""Loads one run in detail for `status`, `top` and `report`: origin, output times, positions of ranks, stragglers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from clusterctl.agent.protocol.record_types import ActivitySample
from clusterctl.agent.protocol.run_files import SAMPLES_FILE, format_index_path, format_output_path
from clusterctl.agent.protocol.stall_folders import list_stall_folders
from clusterctl.cli.run_views import make_sampled_activity, predict_unattended_run, read_stall_verdict, update_stall_age
from clusterctl.render.stack_report import summarize_stacks
from clusterctl.render.status_report import RunSnapshot, WorkerActivity
from clusterctl.run.record import run_origin, sample_files, state_reader
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import PROGRESS_FIELDS
from clusterctl.run.record.saved_verdict import read_evidence
from clusterctl.run.rules import rank_timing, stack_dump_parser
from clusterctl.run.rules.goodput import measure_goodput
from clusterctl.run.rules.rank_timing import WAIT_FIELDS
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.validation.node_samples import RankFields
from clusterctl.why import slowness
from clusterctl.why.slowness import LONG_WAIT_S, find_stragglers

_MAX_SAMPLE_BYTES, _MAX_SAMPLE_LINES = 256 << 10, 8
"""Maximum bytes and lines to read from each node's samples. The limits are low because a run may have many nodes."""
STATUS_FIELDS = RankFields(WAIT_FIELDS.activity, (*WAIT_FIELDS.status, *PROGRESS_FIELDS.status))
"""The fields of samples that `build_run_view` and `add_stragglers` need."""
_NO_ACTIVITY = WorkerActivity()


def load_status_view(run: RunDir, with_output_times: Callable[[RunState], bool] = lambda _: True) -> RunSnapshot:
    """Return the snapshot that `status` shows, with ranks that are slower than others.

    Args:
        run: The run.
        with_output_times: Whether to read the time of each rank's last output, which takes two files for each rank.
    """
    state, has_controller = state_reader.load_state_and_attendance(run)
    newest = sample_files.read_latest_activities(run, state, STATUS_FIELDS)
    outputs = with_output_times(state)
    view = build_run_view(run, state, has_controller=has_controller, newest_samples=newest, with_output_times=outputs)
    return add_stragglers(run, view, newest)


def build_run_view(
    run: RunDir,
    state: RunState,
    *,
    has_controller: bool,
    newest_samples: Mapping[str, ActivitySample] | None = None,
    with_output_times: bool = True,
) -> RunSnapshot:
    """Return the snapshot of a run: its state, its activity, its origin and the positions of its ranks.

    Args:
        run: The run.
        state: The state of the run.
        has_controller: Whether the controller of the run is alive.
        newest_samples: The newest samples of ranks, by node; `None` reads the samples from files.
        with_output_times: Whether to read the time of each rank's last output, which takes two files for each rank.
    """
    where: list[str] = []
    if state.stall is not None and state.stall.phase == "confirmed":
        where = describe_stalled_ranks(run, state)
    return RunSnapshot(
        state=update_stall_age(state),
        has_controller=has_controller,
        activity=_load_activity(run, state, newest_samples, with_output_times=with_output_times),
        verdict=read_stall_verdict(run, state),
        origin=run_origin.read_origin(run),
        stall_positions=where,
        goodput=None if state.attempt < 0 else measure_goodput(state, time.time()),
        unattended_run=predict_unattended_run(run, state, has_controller=has_controller),
    )


def _load_activity(
    run: RunDir, state: RunState, newest_samples: Mapping[str, ActivitySample] | None, *, with_output_times: bool
) -> dict[int, WorkerActivity]:
    now = time.time()
    sampled = make_sampled_activity(
        state, sample_files.read_latest_activities(run, state) if newest_samples is None else newest_samples, now
    )
    if not with_output_times:
        return {rank: sampled.get(rank, _NO_ACTIVITY) for rank in state.workers}
    folders = {node: str(run.node(node)) for node in state.nodes}
    return {
        rank: _add_output_age(folders.get(worker.node), state.attempt, rank, sampled.get(rank), now)
        for rank, worker in state.workers.items()
    }


def _add_output_age(
    folder: str | None, attempt: int, rank: int, sampled: WorkerActivity | None, now: float
) -> WorkerActivity:
    activity = sampled or _NO_ACTIVITY
    names = () if folder is None else (format_output_path(attempt, rank), format_index_path(attempt, rank))
    written = max((_get_write_time(f"{folder}/{name}") for name in names), default=0.0)
    return replace(activity, last_output_s=max(0.0, now - written)) if written else activity


def _get_write_time(path: str) -> float:
    """Return the time of the last write of a file; 0 if the file does not exist."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def build_report_view(run: RunDir, state: RunState, *, has_controller: bool, step: int | None) -> RunSnapshot:
    """Return the snapshot of a run for its report; the activity contains only the step of the slowest rank."""
    return RunSnapshot(
        state=update_stall_age(state),
        has_controller=has_controller,
        activity={0: WorkerActivity(step=step)},
        origin=run_origin.read_origin(run),
        goodput=None if state.attempt < 0 else measure_goodput(state, time.time()),
    )


def describe_stalled_ranks(run: RunDir, state: RunState) -> list[str]:
    """Return lines with the stacks of the ranks of a stalled run, from the stored evidence."""
    nodes = tuple((rank, worker.node) for rank, worker in state.workers.items())
    for name in reversed(list_stall_folders(str(run.path))):
        folder = run.path / name
        with contextlib.suppress(OSError):
            if lines := _summarize_evidence(folder, folder.stat().st_mtime_ns, nodes):
                return lines
    return []


@lru_cache(maxsize=4)
def _summarize_evidence(folder: Path, _: int, nodes: tuple[tuple[int, str], ...]) -> list[str]:
    """Return the lines about the stacks in a folder of evidence. Parsing takes long, and screens ask each second."""
    if found := read_evidence(folder):
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
            stacks = stack_dump_parser.fold_stacks(stack_dump_parser.parse_rank_stacks(found))
            return summarize_stacks(stacks, dict(nodes))
    return []


def add_stragglers(run: RunDir, view: RunSnapshot, newest_samples: Mapping[str, ActivitySample]) -> RunSnapshot:
    """Return the snapshot of a run with its stragglers, each with the likely reason.

    Args:
        run: The run.
        view: The snapshot of the run without stragglers.
        newest_samples: The newest samples of ranks, by node.
    """
    state = view.state
    # The waits of ranks can be compared only within a role.
    if state.phase is not RunPhase.RUNNING or any(node.role for node in state.nodes.values()):
        return view
    if not rank_timing.has_recent_progress(newest_samples.values(), state.attempt, LONG_WAIT_S) and (
        slow := load_blocking_ranks(run, state)
    ):
        return replace(view, slow_ranks=slow)
    if not rank_timing.have_all_ranks_wait_counts(newest_samples.values()):
        return view
    # Read the samples of one node at a time, because the samples of all nodes are tens of megabytes.
    ends = ((last, _read_recent_samples(run, node)) for node, last in newest_samples.items())
    stragglers = find_stragglers(rank_timing.measure_wait_shares(ends, state.attempt))
    return (
        replace(
            view,
            slow_ranks=_explain_stragglers(view, stragglers, {n: _read_recent_samples(run, n) for n in newest_samples}),
        )
        if stragglers
        else view
    )


def _read_recent_samples(run: RunDir, node: str) -> list[bytes]:
    return sample_files.read_last_lines(run.node(node) / SAMPLES_FILE, _MAX_SAMPLE_BYTES)


def load_blocking_ranks(run: RunDir, state: RunState) -> dict[int, str]:
    """Return the ranks for which all other ranks have waited for a long time, each with its activity."""
    idle_ranks = rank_timing.find_idle_ranks(
        sample_files.read_sample_lines(run, state, _MAX_SAMPLE_BYTES), state.attempt
    )
    return {rank: idle_ranks[rank].activity for rank in slowness.find_blocking_ranks(idle_ranks, len(state.workers))}


def _explain_stragglers(view: RunSnapshot, slow: Sequence[int], ends: Mapping[str, Sequence[bytes]]) -> dict[int, str]:
    state = view.state
    known = rank_timing.measure_rank_timings(ends, state.attempt, max_lines=_MAX_SAMPLE_LINES)
    troubles = {node: tuple(t.message for (n, _, _), t in state.troubles.items() if n == node) for node in state.nodes}
    return {
        rank: slowness.describe_reason(known, rank, troubles[state.workers[rank].node]) if {rank} < known.keys() else ""
        for rank in slow
    }
