from __future__ import annotations

import pytest

from clusterctl.agent.protocol.events import Exited
from clusterctl.logs.failure_tails import MAX_FULL_TAILS, FailureTails, is_failure, select_cause_lines

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: {}\n'


@pytest.mark.parametrize(
    ("exited", "failed"),
    [
        pytest.param(Exited(0, 1, exit_code=0), False, id="ended well"),
        pytest.param(Exited(0, 1, exit_code=1), True, id="failed"),
        pytest.param(Exited(0, 1, signal=9), True, id="killed by somebody else"),
        pytest.param(Exited(0, 1, signal=15, stopped=True), False, id="stopped by us"),
        pytest.param(Exited(0, 1), True, id="nobody saw its exit"),
    ],
)
def test_only_a_worker_that_ended_badly_by_itself_failed(exited: Exited, failed: bool) -> None:
    assert is_failure(exited) is failed


def test_an_end_begins_with_the_last_traceback() -> None:
    assert select_cause_lines("step 1\n" + TRACE.format("bad")) == TRACE.format("bad").splitlines()


def test_a_chain_of_tracebacks_is_kept_whole() -> None:
    tail = "x\n" + TRACE.format("a") + "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert (
        select_cause_lines(tail + TRACE.format("b"))[3] == "ValueError: a"
        or select_cause_lines(tail + TRACE.format("b"))[2]
    )
    assert len(select_cause_lines(tail + TRACE.format("b"))) == 7


def test_an_end_without_traceback_is_its_last_lines() -> None:
    assert select_cause_lines("".join(f"{n}\n" for n in range(100))) == [str(n) for n in range(80, 100)]


def test_shows_the_end_of_a_failing_rank_once() -> None:
    ends = FailureTails({0})
    exits = [("gpu02", 5.0, Exited(0, 3, exit_code=1, tail=TRACE.format("bad")))]
    assert [(line.node, line.rank, line.text) for line in ends.select_lines(exits)][-1] == (
        "gpu02",
        3,
        "ValueError: bad",
    )
    assert ends.select_lines(exits) == []


def test_ranks_that_are_shown_anyway_are_left_out() -> None:
    exited = ("gpu02", 5.0, Exited(0, 3, exit_code=1, tail="x"))
    assert FailureTails({3}).select_lines([exited]) == []
    assert FailureTails(None).select_lines([exited]) == []


def test_many_different_ends_shrink_to_their_last_lines() -> None:
    ends = FailureTails({0})
    exits = [("n", 0.0, Exited(0, rank, exit_code=1, tail=TRACE.format(rank))) for rank in range(1, 20)]
    assert len(ends.select_lines(exits)) == MAX_FULL_TAILS * 3 + (19 - MAX_FULL_TAILS)
