"""Evidence of stalls that is kept with a run.

What ranks had told before they were stopped with their peers: the ends of their outputs, and their last counters.

The verdict on a run, from what is kept of it, and kept with it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from clusterctl.agent.protocol.evidence_files import list_stall_folders
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.record_types import RankEvidence
from clusterctl.agent.protocol.run_files import format_index_path, format_output_path
from clusterctl.logs.time_index import TimeIndex
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.rundir import VERDICT_JSON, VERDICT_TEXT, RunDir
from clusterctl.run.record.sample_files import read_newest_lines
from clusterctl.run.rules import rank_timing
from clusterctl.run.rules.state import RunPhase, RunState, StallView, WorkerState
from clusterctl.run.rules.why_evidence import build_why_evidence
from clusterctl.validation import messages
from clusterctl.validation import samples as door
from clusterctl.why import slowness
from clusterctl.why.evidence import IdleRank, RankTiming
from clusterctl.why.judge import judge_run
from clusterctl.why.verdict import Kind, Verdict, verdict_lines

LIVE_EVIDENCE_FOLDER = "look"
"""The folder of a bundle with what was seen of a run that nobody called stalled when it was made."""
_MAX_EVIDENCE_BYTES = 16 << 20


def _list_rank_files(folder: Path) -> list[str]:
    """Return which files say something of a rank. There may be thousands: no paths are made of them."""
    try:
        return [name for name in os.listdir(folder) if name.startswith("rank-") and name.endswith(".json")]
    except OSError:
        return []


def _read_file(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Room is made for all that is asked for.
        return os.read(file, min(_MAX_EVIDENCE_BYTES, os.fstat(file).st_size))
    finally:
        os.close(file)


def read_newest_evidence(run: RunDir) -> tuple[str | None, dict[str, RankEvidence]]:
    """Return the name of the folder with the newest evidence, and what it says of each rank; a bad file is left out."""
    names = list_stall_folders(str(run.path))
    if not names:
        return None, {}
    return names[-1], read_evidence(run.path / names[-1])


def read_evidence(folder: Path) -> dict[str, RankEvidence]:
    """Return what a folder says of each rank."""
    by_rank: dict[str, RankEvidence] = {}
    for name in sorted(_list_rank_files(folder)):
        try:
            evidence = json.loads(_read_file(f"{folder}/{name}"))
            by_rank[str(int(evidence["rank"]))] = messages.validate_rank_evidence(evidence)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, FrameError):
            continue
    return by_rank


_END_BYTES = 8192
_MAX_RANKS = 1024


def read_final_outputs(run: RunDir, state: RunState) -> dict[int, str]:
    """Return the ends of what ranks wrote before they were stopped, by rank; none where a failure tells for itself.

    A rank that the signal ended wrote nothing on account of it. Of one that may have caught it only that counts which
    was written before any rank had ended.
    """
    first = _find_first_exit(state)
    if first is None:
        return {}
    stopped = [worker for worker in state.workers.values() if worker.stopped]
    return {worker.rank: end for worker in stopped[:_MAX_RANKS] if (end := _read_output_end(run, state, worker, first))}


def read_final_counters(run: RunDir, state: RunState) -> dict[int, Mapping[str, tuple[int, int]]]:
    """Return what ranks had begun and ended, by process group, when they were last seen before one of them ended."""
    first = _find_first_exit(state)
    if first is None:
        return {}
    before = {node: first + state.ahead(node) for node in state.nodes}
    return rank_timing.read_counts_before(read_newest_lines(run, state), state.attempt, before)


def _find_first_exit(state: RunState) -> float | None:
    """Return when the first rank ended, where all that failed by themselves say that they lost a peer."""
    failed = [
        worker.exit_analysis for worker in state.workers.values() if worker.failed and worker.exit_analysis is not None
    ]
    if not failed or not all(analysis.cause.secondary for analysis in failed):
        return None
    return min(analysis.earliest for analysis in failed)


def _read_output_end(run: RunDir, state: RunState, worker: WorkerState, first: float) -> str:
    folder = run.node(worker.node)
    size = None
    if worker.signal != signal.SIGTERM:
        index = TimeIndex(str(folder / format_index_path(state.attempt, worker.rank)))
        size = index.size_before(first + state.ahead(worker.node))
    return _read_end(folder / format_output_path(state.attempt, worker.rank), size)


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
"""Ranks that give up write that they do, which is a sign of life, and end."""


class _Progress(TypedDict):
    timings: Mapping[int, RankTiming]
    idle_ranks: Mapping[int, IdleRank]
    no_progress_s: float | None


def judge_saved_run(run: RunDir, state: RunState, live_evidence: Mapping[str, RankEvidence] | None = None) -> Verdict:
    """Return what went wrong with a run; `now` is evidence that was just taken, where what is kept says nothing."""
    name, evidence = read_stall_evidence(run, state)
    case = build_why_evidence(
        state,
        live_evidence or evidence or read_evidence(run.path / LIVE_EVIDENCE_FOLDER),
        evidence_folder=None if name is None else str(run.path / name),
        folder=str(run.path),
        stalled=_find_stall(state) is not None,
        outputs=read_final_outputs(run, state),
        collective_counts=read_final_counters(run, state),
    )
    return judge_run(replace(case, **_measure_progress(run, state)))


def _measure_progress(run: RunDir, state: RunState) -> _Progress:
    """Return what ranks did of late and for how long they have not begun; nothing of a run that stands or is over."""
    if state.phase is not RunPhase.RUNNING or state.stall is not None:
        return {"timings": {}, "idle_ranks": {}, "no_progress_s": None}
    lines = read_newest_lines(run, state)
    return {
        "timings": rank_timing.measure_rank_timings(lines, state.attempt),
        "idle_ranks": rank_timing.find_idle_ranks(lines, state.attempt),
        "no_progress_s": measure_start_wait_s(lines, state),
    }


def measure_start_wait_s(lines: Mapping[str, Sequence[bytes]], state: RunState) -> float | None:
    """Return for how many seconds the ranks of an attempt have run without any progress; `None` once there was one."""
    if state.running_since is None or not rank_timing.has_no_progress_yet(lines, state.attempt):
        return None
    newest = [next(door.parse_samples(reversed(own), "activity", "t"), None) for own in lines.values()]
    return max(
        (s["t"] - state.ahead(node) - state.running_since for node, s in zip(lines, newest, strict=True) if s),
        default=0.0,
    )


def should_collect_stacks(run: RunDir, state: RunState, verdict: Verdict) -> bool:
    """Return whether stacks would tell more of a run that moves slowly, or whose first step does not come."""
    if verdict.kind is Kind.SLOW:
        return True
    since = measure_start_wait_s(read_newest_lines(run, state), state) if state.phase is RunPhase.RUNNING else None
    return since is not None and since >= slowness.LONG_START_S


def read_stall_evidence(run: RunDir, state: RunState) -> tuple[str | None, dict[str, RankEvidence]]:
    """Return the folder and the evidence of the standstill in which a run is, or from which it ended; `None` without.

    What was seen in an earlier standstill, or attempt, says nothing of this one.
    """
    name = find_evidence_folder(state)
    return (None, {}) if name is None else (name, read_evidence(run.path / name))


def find_evidence_folder(state: RunState) -> str | None:
    """Return the folder in which that evidence is; `None` without."""
    stall = _find_stall(state)
    return None if stall is None else stall.evidence


def _find_stall(state: RunState) -> StallView | None:
    if state.stall is not None or state.last_stall is None:
        return state.stall
    ends = [worker.exit_analysis.latest for worker in state.workers.values() if worker.exit_analysis is not None]
    soon = bool(ends) and min(ends) <= (state.last_stall.until or 0.0) + _MAX_REACTION_S
    return state.last_stall if soon else None


def save_verdict(run: RunDir, verdict: Verdict) -> None:
    """Write a verdict into the folder of its run.

    Raises:
        OSError: It cannot be written.
    """
    text = "".join(f"{label:6} {words}\n" if label else f"{words}\n" for label, words in verdict_lines(verdict))
    write_atomically(run.path / VERDICT_JSON, (json.dumps(verdict.as_json(), indent=1) + "\n").encode())
    write_atomically(run.path / VERDICT_TEXT, text.encode())
