"""Whom the others have waited for since long, in a run that shows signs of life and so is never called stalled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli.status_views import add_stragglers, build_run_view
from clusterctl.cli.verdicts import open_bundle
from clusterctl.run.record.sample_files import read_latest_activities
from clusterctl.run.record.state_reader import load_state_and_attendance
from clusterctl.run.rules.rank_timing import find_idle_ranks, read_collective_counts_before
from clusterctl.why.evidence_types import IdleRank
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import Confidence, Fault, ProblemKind, Verdict
from tests.unit.why.cases import case, elsewhere, waiting

KINDS = Path(__file__).parent / "kinds"
IN, OUT = (
    IdleRank(seconds=90.0, is_in_collective=True),
    IdleRank(seconds=91.0, is_in_collective=False, activity="it writes 12 MiB a second"),
)


def of(*each: IdleRank, looks: tuple[Any, ...] = (), **more: Any) -> Verdict:
    return judge_run(case(*(looks or (None,) * len(each)), idle_ranks=dict(enumerate(each)), **more))


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


def test_the_rank_that_goes_on_with_something_while_all_others_wait_is_named_with_what_it_does() -> None:
    verdict = of(OUT, IN, IN, IN)

    assert (verdict.kind, verdict.cls, verdict.confidence) == (ProblemKind.SLOW, Fault.SLOW, Confidence.LIKELY)
    assert named(verdict) == [0]
    assert verdict.summary == (
        "ranks 1-3 have waited in a collective for 90 s for rank 0 on gpu01: it writes 12 MiB a second"
    )


def test_its_line_is_told_where_somebody_looked_and_found_it_elsewhere() -> None:
    assert of(IN, OUT, IN, looks=(waiting(), elsewhere(), waiting())).culprits[0].where == "train.py:21"
    assert of(IN, OUT, IN, looks=(waiting(), waiting(), waiting())).culprits[0].where is None


def test_all_ranks_of_one_node_are_likely_and_ranks_of_two_are_not() -> None:
    assert of(OUT, OUT, IN, IN).confidence is Confidence.LIKELY
    assert of(OUT, IN, OUT, IN, IN, IN).confidence is Confidence.AMBIGUOUS


@pytest.mark.parametrize(
    "each",
    [
        pytest.param((OUT, IdleRank(seconds=30.0, is_in_collective=True), IN, IN), id="for a short time"),
        pytest.param((IN, IN, IN, IN), id="all wait"),
        pytest.param((OUT, OUT, OUT, IN), id="most do not wait"),
        pytest.param((OUT, OUT, OUT, OUT), id="nobody waits"),
    ],
)
def test_otherwise_nobody_is_named(each: tuple[IdleRank, ...]) -> None:
    assert of(*each).kind is ProblemKind.NONE


def test_where_one_is_not_counted_nobody_is_named() -> None:
    assert judge_run(case(None, None, None, idle_ranks={0: OUT, 1: IN})).kind is ProblemKind.NONE


def seen(m: float, begun: int, ended: int, since: float | None = 90.0, **more: Any) -> bytes:
    inside = {"pid": 7, "beats": 0, "seq": {"0": [begun, ended]}, "progress_age_s": since}
    rank = {"alive": True, "pid": 7, "cpu_s": 0.0, "wchan": None, "inside": inside, **more}
    return json.dumps({"kind": "activity", "t": 1000 + m, "m": m, "attempt": 0, "ranks": {"3": rank}}).encode()


@pytest.mark.parametrize(
    ("first", "last", "does"),
    [
        pytest.param({"written": 0}, {"written": 40 << 20}, "it writes 4.0 MiB a second", id="writes"),
        pytest.param({"read": 0}, {"read": 40 << 20, "written": 900}, "it reads 4.0 MiB a second", id="reads"),
        pytest.param({}, {"cpu_s": 9.0}, "it computes", id="computes"),
        pytest.param({}, {"written": 900, "wchan": "hrtimer_nanosleep"}, "it sleeps", id="sleeps"),
        pytest.param({}, {"pid": 8, "written": 40 << 20}, "", id="another process"),
    ],
)
def test_what_a_rank_does_meanwhile_is_told_by_two_looks(
    first: dict[str, Any], last: dict[str, Any], does: str
) -> None:
    lines = {"gpu02": [seen(0, 60, 60, **first), seen(10, 60, 60, **last)]}

    assert find_idle_ranks(lines, 0) == {3: IdleRank(seconds=90.0, is_in_collective=False, activity=does)}


def test_a_rank_that_has_begun_what_has_not_ended_waits() -> None:
    assert find_idle_ranks({"gpu02": [seen(0, 61, 60)]}, 0)[3].is_in_collective


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(seen(0, 61, 60, None), id="it has not made any progress yet"),
        pytest.param(seen(0, 61, 60, alive=False), id="it is gone"),
        pytest.param(seen(0, 61, 60, inside=None), id="it tells nothing of itself"),
    ],
)
def test_what_is_not_counted_is_left_out(line: bytes) -> None:
    assert find_idle_ranks({"gpu02": [line]}, 0) == {}


def test_samples_of_another_attempt_count_for_nothing() -> None:
    assert find_idle_ranks({"gpu02": [seen(0, 61, 60)]}, 1) == {}
    assert read_collective_counts_before({"gpu02": [seen(0, 61, 60)]}, 1, {"gpu02": 1001.0}) == {}


def test_the_counters_are_those_of_the_newest_look_before_the_moment_and_not_of_long_ago() -> None:
    lines = {"gpu02": [seen(0, 60, 59), seen(2, 61, 60), seen(4, 61, 61)]}

    assert read_collective_counts_before(lines, 0, {"gpu02": 1003.0}) == {3: {"0": (61, 60)}}
    assert read_collective_counts_before(lines, 0, {"gpu02": 1030.0}) == {}
    assert read_collective_counts_before(lines, 0, {"gpu02": 999.0}) == {}


def test_status_marks_it_with_what_it_does() -> None:
    with open_bundle(KINDS.with_name("bundles") / "saves-0.tar.gz") as run:
        state, attended = load_state_and_attendance(run)
        view = add_stragglers(
            run, build_run_view(run, state, has_controller=attended), read_latest_activities(run, state)
        )

    assert list(view.slow_ranks) == [0]
    assert view.slow_ranks[0].startswith("it writes ")


@pytest.mark.parametrize("inside", [None, {}, {"step": 7}, {"seq": None}, {"seq": {"0": [3, 2]}}], ids=str)
def test_of_a_rank_that_tells_little_of_itself_nothing_is_said(inside: dict[str, Any] | None) -> None:
    rank = {"alive": True, "pid": 7, "inside": inside}
    line = json.dumps({"kind": "activity", "t": 9.0, "m": 9.0, "attempt": 0, "ranks": {"3": rank}}).encode()

    assert find_idle_ranks({"gpu02": [line]}, 0) == {}
    told = read_collective_counts_before({"gpu02": [line]}, 0, {"gpu02": 9.0})
    assert told == ({3: {"0": (3, 2)}} if inside and inside.get("seq") else {})
