"""The short form of a verdict: what whoever watches a run is told, in five lines at most."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.why.evidence_types import Evidence, RankExit
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import format_brief_lines
from tests.unit.why.cases import case, elsewhere, ended, entry, lost_peer, raised, waiting

BEGUN = {"0": (12, 11)}
HUNG = case(
    waiting(entries=(entry(12),)),
    elsewhere(entries=(entry(11, done=True),)),
    waiting(entries=(entry(12),)),
    stalled=True,
)

SUMMARY = "rank 1 on gpu01 (train.py:21) did not join all_reduce, in which ranks 0,2 wait: it sleeps"


def test_a_hang_is_told_with_who_where_the_others_wait_and_what_to_type() -> None:
    assert format_brief_lines(judge_run(HUNG), "demo-abcd") == [
        f"hang NOT_JOINED, certain: {SUMMARY}",
        "  who    rank 1 gpu01  train.py:21 in load",
        "  waits  ranks 0,2  train.py:26 all_reduce",
        "  next   clusterctl stacks demo-abcd; and 1 more",
        "  `clusterctl why demo-abcd` tells more",
    ]


def test_beside_the_report_of_an_end_it_does_not_say_again_what_to_type() -> None:
    told = format_brief_lines(
        judge_run(case(lost_peer(), raised("ValueError: bad batch"), has_ended=True)),
        "demo-abcd",
        with_next_commands=False,
    )

    assert told == [
        "why: crash EXCEPTION, certain: rank 1 on gpu01 failed first: ValueError: bad batch",
        "  who    rank 1 gpu01  train.py:7 in load",
        "  waits  rank 0  lost a peer",
        "  `clusterctl why demo-abcd` tells more",
    ]


@pytest.mark.parametrize("error", ["ValueError: bad batch", "ValueError: " + "bad " * 99])
def test_an_error_that_stands_beside_it_is_not_said_again(error: str) -> None:
    failed = case(lost_peer(), raised(error), has_ended=True)

    assert (
        format_brief_lines(judge_run(failed), "demo-abcd", shown_error=error)[0]
        == "crash EXCEPTION, certain: rank 1 on gpu01 failed first"
    )


@pytest.mark.parametrize(
    "failed",
    [
        pytest.param([lost_peer(), raised("ValueError: bad batch")], id="one"),
        pytest.param([raised("ValueError: bad batch"), raised("ValueError: bad batch")], id="alike"),
    ],
)
def test_a_crash_that_is_told_beside_it_gets_one_line(failed: list[RankExit]) -> None:
    told = format_brief_lines(
        judge_run(case(*failed, has_ended=True)),
        "demo-abcd",
        with_next_commands=False,
        shown_error="ValueError: bad batch",
    )

    assert told == ["why: EXCEPTION, certain, at train.py:7 in load; `clusterctl why demo-abcd` tells more"]


def test_what_the_error_beside_it_does_not_say_stands_in_that_line() -> None:
    error = "KeyError: 'SLURM_PROCID'"
    told = format_brief_lines(
        judge_run(case(raised(error), raised(error), has_ended=True)),
        "demo-abcd",
        with_next_commands=False,
        shown_error=error,
    )

    (line,) = told
    assert line.startswith("why: EXCEPTION, certain, at train.py:7 in load; `SLURM_PROCID` is a variable of Slurm")
    assert line.endswith("read `RANK` instead; `clusterctl why demo-abcd` tells more")


def test_stacks_of_a_run_that_has_ended_are_not_recommended() -> None:
    assert [step for step in judge_run(HUNG).next_commands if "stacks" in step]
    assert not [step for step in judge_run(replace(HUNG, has_ended=True)).next_commands if "stacks" in step]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(HUNG, id="a hang"),
        pytest.param(case(waiting(seq=BEGUN), None, None, elsewhere(), stalled=True), id="some were not seen"),
        pytest.param(case(*(raised(f"ValueError: {n}") for n in range(12))), id="many fail alike"),
        pytest.param(case(*(elsewhere(line=n) for n in range(20, 40)), stalled=True), id="all are elsewhere"),
    ],
)
def test_it_never_has_more_than_five_lines(given: Evidence) -> None:
    told = format_brief_lines(judge_run(given), "demo-abcd")

    assert 2 <= len(told) <= 5
    assert told[-1] == "  `clusterctl why demo-abcd` tells more"


def test_where_nothing_went_wrong_there_is_none() -> None:
    assert format_brief_lines(judge_run(case(ended(0), ended(0), has_ended=True)), "demo-abcd") == []
