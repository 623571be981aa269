"""The verdict on a run, from what is kept of it, and kept with it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from clusterctl.run.record.disk import write_atomically
from clusterctl.run.record.kept import evidence as kept
from clusterctl.run.record.kept import last_words
from clusterctl.run.record.kept.told import VERDICT_JSON, VERDICT_TEXT
from clusterctl.run.record.samples import newest_lines
from clusterctl.run.rules import rank_timing
from clusterctl.run.rules.state import RunPhase
from clusterctl.run.rules.why_evidence import build_why_evidence
from clusterctl.validation import samples as door
from clusterctl.why import slowness
from clusterctl.why.judge import judge_run
from clusterctl.why.verdict import Kind
from clusterctl.why.verdict_text import verdict_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.agent.protocol.process_types import RankEvidence
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState, StallView
    from clusterctl.why.evidence import IdleRank, RankTiming
    from clusterctl.why.verdict import Verdict

_LAST_WORDS_S = 30.0
"""Ranks that give up write that they do, which is a sign of life, and end."""


class _Moving(TypedDict):
    paces: Mapping[int, RankTiming]
    standing: Mapping[int, IdleRank]
    unbegun: float | None


def of(run: RunDir, state: RunState, now: Mapping[str, RankEvidence] | None = None) -> Verdict:
    """Return what went wrong with a run; `now` is evidence that was just taken, where what is kept says nothing."""
    name, evidence = evidence_of(run, state)
    case = build_why_evidence(
        state,
        now or evidence or kept.of_folder(run.path / kept.LOOK),
        seen_at=None if name is None else str(run.path / name),
        folder=str(run.path),
        stalled=_standstill(state) is not None,
        outputs=last_words.outputs(run, state),
        collective_counts=last_words.counters(run, state),
    )
    return judge_run(replace(case, **_pace(run, state)))


def _pace(run: RunDir, state: RunState) -> _Moving:
    """Return what ranks did of late and for how long they have not begun; nothing of a run that stands or is over."""
    if state.phase is not RunPhase.RUNNING or state.stall is not None:
        return {"paces": {}, "standing": {}, "unbegun": None}
    lines = newest_lines(run, state)
    return {
        "paces": rank_timing.measure_rank_timings(lines, state.attempt),
        "standing": rank_timing.find_idle_ranks(lines, state.attempt),
        "unbegun": time_unbegun(lines, state),
    }


def time_unbegun(lines: Mapping[str, Sequence[bytes]], state: RunState) -> float | None:
    """Return for how many seconds the ranks of an attempt have run without any progress; `None` once there was one."""
    if state.running_since is None or not rank_timing.has_no_progress_yet(lines, state.attempt):
        return None
    newest = [next(door.parse_samples(reversed(own), "activity", "t"), None) for own in lines.values()]
    return max(
        (s["t"] - state.ahead(node) - state.running_since for node, s in zip(lines, newest, strict=True) if s),
        default=0.0,
    )


def calls_for_a_look(run: RunDir, state: RunState, told: Verdict) -> bool:
    """Return whether stacks would tell more of a run that moves slowly, or whose first step does not come."""
    if told.kind is Kind.SLOW:
        return True
    since = time_unbegun(newest_lines(run, state), state) if state.phase is RunPhase.RUNNING else None
    return since is not None and since >= slowness.LONG_START_S


def evidence_of(run: RunDir, state: RunState) -> tuple[str | None, dict[str, RankEvidence]]:
    """Return the folder and the evidence of the standstill in which a run is, or from which it ended; `None` without.

    What was seen in an earlier standstill, or attempt, says nothing of this one.
    """
    name = place_of_evidence(state)
    return (None, {}) if name is None else (name, kept.of_folder(run.path / name))


def place_of_evidence(state: RunState) -> str | None:
    """Return the folder in which that evidence is; `None` without."""
    stall = _standstill(state)
    return None if stall is None else stall.evidence


def _standstill(state: RunState) -> StallView | None:
    if state.stall is not None or state.last_stall is None:
        return state.stall
    ends = [worker.exit_analysis.latest for worker in state.workers.values() if worker.exit_analysis is not None]
    soon = bool(ends) and min(ends) <= (state.last_stall.until or 0.0) + _LAST_WORDS_S
    return state.last_stall if soon else None


def keep(run: RunDir, verdict: Verdict) -> None:
    """Write a verdict into the folder of its run.

    Raises:
        OSError: It cannot be written.
    """
    text = "".join(f"{label:6} {words}\n" if label else f"{words}\n" for label, words in verdict_lines(verdict))
    write_atomically(run.path / VERDICT_JSON, (json.dumps(verdict.as_json(), indent=1) + "\n").encode())
    write_atomically(run.path / VERDICT_TEXT, text.encode())
