"""Judges a run from its files on the head: stored evidence, last outputs, and samples. Saves the verdict."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.record_types import RankEvidence
from clusterctl.agent.protocol.run_files import format_index_path, format_output_path
from clusterctl.logs.time_index import TimeIndex
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.rundir import VERDICT_JSON, VERDICT_TEXT, RunDir
from clusterctl.run.record.sample_files import read_sample_lines
from clusterctl.run.rules import rank_timing
from clusterctl.run.rules.state import RunPhase, RunState, StallState
from clusterctl.run.rules.why_input import build_why_evidence
from clusterctl.validation import message_validators, node_samples
from clusterctl.why import slowness
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import ProblemKind, Verdict, format_verdict_lines

LIVE_EVIDENCE_FOLDER = "look"
"""The folder in a bundle for evidence that was collected while the bundle was saved."""


def read_evidence(folder: Path) -> dict[str, RankEvidence]:
    """Return the evidence of each rank in a folder. Invalid files are ignored."""
    by_rank: dict[str, RankEvidence] = {}
    # Use strings, which are faster than `Path` objects, because there may be thousands of files.
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        if name.startswith("rank-") and name.endswith(".json"):
            try:
                with open(f"{folder}/{name}", "rb") as file:
                    evidence = json.load(file)
                by_rank[str(int(evidence["rank"]))] = message_validators.validate_rank_evidence(evidence)
            except (OSError, ValueError, KeyError, TypeError, RecursionError, FrameError):
                continue
    return by_rank


_END_BYTES = 8192
_MAX_RANKS = 1024


def read_outputs_before_stop(run: RunDir, state: RunState) -> dict[int, str]:
    """Return the last output of each stopped rank before the stop; empty if a rank failed for a reason of its own.

    A rank that SIGTERM killed has written nothing after the signal. Any other rank may have caught SIGTERM, so only its
    output before the first exit counts.
    """
    first = _find_first_exit(state)
    if first is None:
        return {}
    stopped = [worker for worker in state.workers.values() if worker.stopped]
    outputs: dict[int, str] = {}
    for worker in stopped[:_MAX_RANKS]:
        folder, size = run.node(worker.node), None
        if worker.signal != signal.SIGTERM:
            index = TimeIndex(str(folder / format_index_path(state.attempt, worker.rank)))
            size = index.find_size_before(first + state.clock_ahead_s(worker.node))
        if text := _read_end(folder / format_output_path(state.attempt, worker.rank), size):
            outputs[worker.rank] = text
    return outputs


def read_collective_counts_before_failure(run: RunDir, state: RunState) -> dict[int, Mapping[str, tuple[int, int]]]:
    """Return the collective numbers of each rank in its last sample before the first exit."""
    first = _find_first_exit(state)
    if first is None:
        return {}
    before = {node: first + state.clock_ahead_s(node) for node in state.nodes}
    return rank_timing.read_collective_counts_before(read_sample_lines(run, state), state.attempt, before)


def _find_first_exit(state: RunState) -> float | None:
    """Return the time of the first failed exit if all failed ranks report a lost peer, else `None`."""
    failed = [
        worker.exit_analysis for worker in state.workers.values() if worker.failed and worker.exit_analysis is not None
    ]
    if not failed or not all(analysis.cause.secondary for analysis in failed):
        return None
    return min(analysis.earliest for analysis in failed)


def _read_end(path: Path, size: int | None) -> str:
    """Return the end of a file, or of its first `size` bytes."""
    try:
        with path.open("rb") as file:
            end = path.stat().st_size if size is None else size
            file.seek(max(0, end - _END_BYTES))
            return file.read(min(end, _END_BYTES)).decode("utf-8", "replace")
    except OSError:
        return ""


_MAX_REACTION_S = 30.0
"""Seconds within which a rank exits after a timeout in a stall. The stall ends when the rank prints its error."""


def judge_saved_run(run: RunDir, state: RunState, live_evidence: Mapping[str, RankEvidence] | None = None) -> Verdict:
    """Return the verdict on a run. `live_evidence` replaces saved evidence."""
    name, stored = read_stall_evidence(run, state)
    evidence = build_why_evidence(
        state,
        live_evidence or stored or read_evidence(run.path / LIVE_EVIDENCE_FOLDER),
        evidence_folder=None if name is None else str(run.path / name),
        folder=str(run.path),
        stalled=_find_stall(state) is not None,
        outputs=read_outputs_before_stop(run, state),
        collective_counts=read_collective_counts_before_failure(run, state),
    )
    if state.phase is RunPhase.RUNNING and state.stall is None:
        lines = read_sample_lines(run, state)
        evidence = replace(
            evidence,
            timings=rank_timing.measure_rank_timings(lines, state.attempt),
            idle_ranks=rank_timing.find_idle_ranks(lines, state.attempt),
            no_progress_s=measure_start_wait_s(lines, state),
        )
    return judge_run(evidence)


def measure_start_wait_s(lines: Mapping[str, Sequence[bytes]], state: RunState) -> float | None:
    """Return for how many seconds no rank has made progress since the start; `None` after the first progress."""
    if state.running_since is None or not rank_timing.has_no_progress_yet(lines, state.attempt):
        return None
    newest = [next(node_samples.parse_samples(reversed(own), "activity", "t"), None) for own in lines.values()]
    return max(
        (s["t"] - state.clock_ahead_s(node) - state.running_since for node, s in zip(lines, newest, strict=True) if s),
        default=0.0,
    )


def should_collect_stacks(run: RunDir, state: RunState, verdict: Verdict) -> bool:
    """Return whether stacks help to judge a run: the run is slow, or its first step is late."""
    if verdict.kind is ProblemKind.SLOW:
        return True
    since = measure_start_wait_s(read_sample_lines(run, state), state) if state.phase is RunPhase.RUNNING else None
    return since is not None and since >= slowness.LONG_START_S


def read_stall_evidence(run: RunDir, state: RunState) -> tuple[str | None, dict[str, RankEvidence]]:
    """Return folder and evidence of the present stall, or of the stall that ended the run; else `(None, {})`.

    Evidence of an earlier stall or attempt does not count.
    """
    name = find_evidence_folder(state)
    return (None, {}) if name is None else (name, read_evidence(run.path / name))


def find_evidence_folder(state: RunState) -> str | None:
    """Return the folder with the evidence of the present or last stall (see `read_stall_evidence`), or `None`."""
    stall = _find_stall(state)
    return None if stall is None else stall.evidence


def _find_stall(state: RunState) -> StallState | None:
    if state.stall is not None or state.last_stall is None:
        return state.stall
    ends = [worker.exit_analysis.latest for worker in state.workers.values() if worker.exit_analysis is not None]
    soon = bool(ends) and min(ends) <= (state.last_stall.until or 0.0) + _MAX_REACTION_S
    return state.last_stall if soon else None


def save_verdict(run: RunDir, verdict: Verdict) -> None:
    """Write a verdict into the folder of its run.

    Raises:
        OSError: The verdict cannot be written.
    """
    text = "".join(f"{label:6} {words}\n" if label else f"{words}\n" for label, words in format_verdict_lines(verdict))
    write_atomically(run.path / VERDICT_JSON, (json.dumps(verdict.as_json(), indent=1) + "\n").encode())
    write_atomically(run.path / VERDICT_TEXT, text.encode())
