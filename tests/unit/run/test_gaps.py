"""A number that is missing in a node's journal: asked for once, then by another session, then passed over."""

from __future__ import annotations

from clusterctl.run.rules.gaps import Gaps, Step


def test_numbers_that_rise_by_one_are_taken() -> None:
    gaps = Gaps()

    assert [gaps.judge("n", known, known + 1, "session") for known in range(5)] == [Step.TAKE] * 5


def test_a_gap_is_asked_for_once_and_what_was_on_its_way_meanwhile_is_left() -> None:
    gaps = Gaps()

    assert gaps.judge("n", 2, 4, "session") is Step.ASK_AGAIN
    assert gaps.judge("n", 2, 5, "session") is Step.LEAVE
    gaps.asked_again("n")
    assert gaps.judge("n", 2, 3, "session") is Step.TAKE
    assert gaps.judge("n", 3, 4, "session") is Step.TAKE


def test_a_session_that_shows_the_gap_again_is_closed_once_and_heard_no_more() -> None:
    gaps = Gaps()
    gaps.judge("n", 2, 4, "session")
    gaps.asked_again("n")

    assert [gaps.judge("n", 2, seq, "session") for seq in (4, 5)] == [Step.HANG_UP, Step.LEAVE]


def test_a_gap_that_another_session_shows_is_passed_over() -> None:
    gaps = Gaps()
    gaps.judge("n", 2, 4, "session")
    gaps.asked_again("n")
    gaps.judge("n", 2, 4, "session")

    assert gaps.judge("n", 2, 4, "another") is Step.PASS_OVER
    assert gaps.judge("n", 4, 5, "another") is Step.TAKE
    assert gaps.judge("n", 5, 7, "another") is Step.ASK_AGAIN


def test_each_node_has_gaps_of_its_own() -> None:
    gaps = Gaps()
    gaps.judge("n", 2, 4, "session")
    gaps.asked_again("n")

    assert gaps.judge("m", 2, 4, "session") is Step.ASK_AGAIN
    assert gaps.judge("m", 2, 4, "session") is Step.LEAVE
