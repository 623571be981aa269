from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from clusterctl.logs.fold import FoldedLine, LineFolder, fold_history
from clusterctl.logs.log_line import LogLine
from tests.work import work


def line(rank: int, text: str, time: float = 0.0, *, partial: bool = False) -> LogLine:
    return LogLine(time, f"gpu{rank // 2:02}", rank, 0, text, partial)


def test_the_same_line_of_many_ranks_is_one() -> None:
    folder = LineFolder(window=0.2)
    assert folder.feed([line(r, "warning") for r in (3, 0, 1)], now=0.0) == []
    (folded,) = folder.take_due_lines(now=0.2)
    assert (folded.ranks, folded.nodes, folded.text) == ((0, 1, 3), ("gpu01", "gpu00"), "warning")


def test_waits_no_longer_once_every_rank_has_written_it() -> None:
    folder = LineFolder(frozenset({0, 1}), window=10.0)
    assert folder.feed([line(0, "x")], now=0.0) == []
    assert [f.ranks for f in folder.feed([line(1, "x")], now=0.1)] == [(0, 1)]


def test_a_single_rank_never_waits() -> None:
    assert [f.text for f in LineFolder(frozenset({0})).feed([line(0, "x"), line(0, "x")], now=0.0)] == ["x", "x"]


def test_a_copy_that_comes_late_is_shown_by_itself() -> None:
    folded = list(fold_history([line(0, "x", 1.0), line(1, "x", 1.1), line(2, "x", 9.0)], window=0.2))
    assert [f.ranks for f in folded] == [(0, 1), (2,)]


def test_repeated_lines_pair_up() -> None:
    folded = list(fold_history([line(0, ""), line(0, ""), line(1, ""), line(1, "")]))
    assert [f.ranks for f in folded] == [(0, 1), (0, 1)]


def test_a_frame_of_a_progress_bar_does_not_fold() -> None:
    folded = list(fold_history([line(0, "10%", partial=True), line(1, "10%", partial=True)]))
    assert [f.ranks for f in folded] == [(0,), (1,)]


def test_a_line_of_one_rank_is_as_it_was() -> None:
    alone = LogLine(7.5, "gpu03", 5, 2, "10%", partial=True)
    assert list(fold_history([alone])) == [FoldedLine(7.5, ("gpu03",), (5,), 2, "10%", partial=True)]


def test_a_line_of_several_ranks_is_whole_and_has_the_time_of_the_first() -> None:
    lines = [LogLine(time, f"n{rank}", rank, 2, "x", partial=False) for rank, time in ((1, 8.1), (0, 8.0))]
    folder = LineFolder()
    folder.feed(lines, now=8.1)
    assert folder.flush() == [FoldedLine(8.0, ("n1", "n0"), (0, 1), 2, "x", partial=False)]


def test_lines_of_different_attempts_are_not_the_same() -> None:
    lines = [LogLine(8.0, "n0", rank, attempt, "x", partial=False) for rank, attempt in ((0, 0), (1, 1))]
    assert [(f.ranks, f.attempt) for f in fold_history(lines)] == [((0,), 0), ((1,), 1)]


def test_a_line_waits_for_a_fifth_of_a_second_and_no_longer() -> None:
    folder = LineFolder()
    assert folder.find_next_due_time() is None
    assert folder.feed([line(0, "x")], now=8.0) == []
    assert folder.find_next_due_time() == 8.2
    assert folder.take_due_lines(now=8.19) == []
    assert [f.text for f in folder.take_due_lines(now=8.2)] == ["x"]
    assert (folder.find_next_due_time(), folder.take_due_lines(now=9.0), folder.flush()) == (None, [], [])


def test_history_is_folded_by_times_that_lie_a_fifth_of_a_second_apart() -> None:
    lines = [line(0, "x", 8.0), line(1, "x", 8.19), line(2, "x", 8.3)]
    assert [f.ranks for f in fold_history(lines)] == [(0, 1), (2,)]


def test_a_time_that_goes_back_holds_nothing_back() -> None:
    lines = [line(0, "x", 9.0), line(1, "y", 1.0), line(2, "z", 9.2)]
    assert [f.text for f in fold_history(lines)] == ["x", "y", "z"]


def test_what_is_due_is_given_before_lines_that_come_then_may_join_it() -> None:
    folder = LineFolder()
    folder.feed([line(0, "x")], now=8.0)
    assert [f.ranks for f in folder.feed([line(1, "x")], now=8.2)] == [(0,)]


def test_a_line_may_join_only_behind_what_its_rank_has_written_before() -> None:
    folder = LineFolder()
    folder.feed([line(0, "a"), line(0, "b"), line(0, "a"), line(1, "b"), line(1, "a")], now=8.0)
    assert [(f.text, f.ranks) for f in folder.flush()] == [("a", (0,)), ("b", (0, 1)), ("a", (0, 1))]


def test_no_more_than_so_many_lines_are_held_however_many_come_at_once() -> None:
    folder, lines = LineFolder(window=60.0), [line(0, str(number)) for number in range(50_000)]
    out = folder.feed(lines, now=0.0)
    assert 50_000 - len(out) == 20_000
    assert [folded.text for folded in out + folder.flush()] == [one.text for one in lines]


def test_the_work_for_equal_lines_grows_as_their_number() -> None:
    few, many = ([line(0, "x")] * number for number in (20_000, 80_000))

    assert work(lambda: fold_alone(many), 3) < 8 * work(lambda: fold_alone(few), 3)


def fold_alone(lines: list[LogLine]) -> None:
    assert len(LineFolder(frozenset({0})).feed(lines, now=0.0)) == len(lines)


FEEDS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.booleans()), max_size=8),
        st.floats(0, 0.3),
    ),
    max_size=12,
)


@given(FEEDS, st.sampled_from([None, frozenset(range(4)), frozenset({0, 1})]))
def test_nothing_is_lost_nothing_is_twice_and_each_rank_keeps_its_order(
    feeds: list[tuple[list[tuple[int, str, bool]], float]], expected: frozenset[int] | None
) -> None:
    folder, now = LineFolder(expected), 0.0
    written, shown = defaultdict(list), defaultdict(list)
    out = []
    for lines, pause in feeds:
        now += pause
        for rank, text, _ in lines:
            written[rank].append(text)
        out += folder.feed([line(r, t, now, partial=p) for r, t, p in lines], now)
    out += folder.flush()
    for folded in out:
        assert len(set(folded.ranks)) == len(folded.ranks)
        for rank in folded.ranks:
            shown[rank].append(folded.text)
    assert shown == written


@given(FEEDS)
def test_no_line_is_held_longer_than_the_window(
    feeds: list[tuple[list[tuple[int, str, bool]], float]],
) -> None:
    folder, now = LineFolder(window=0.2), 0.0
    for lines, pause in feeds:
        now += pause
        folder.feed([line(r, t, now, partial=p) for r, t, p in lines], now)
        due = folder.find_next_due_time()
        assert due is None or due > now
