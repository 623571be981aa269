from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from clusterctl.logs.fold import Folder, fold_history
from clusterctl.logs.line import LogLine
from tests.work import work


def line(rank: int, text: str, time: float = 0.0, *, partial: bool = False) -> LogLine:
    return LogLine(time, f"gpu{rank // 2:02}", rank, 0, text, partial)


def test_the_same_line_of_many_ranks_is_one() -> None:
    folder = Folder(window=0.2)
    assert folder.feed([line(r, "warning") for r in (3, 0, 1)], now=0.0) == []
    (folded,) = folder.due(now=0.2)
    assert (folded.ranks, folded.nodes, folded.text) == ((0, 1, 3), ("gpu01", "gpu00"), "warning")


def test_waits_no_longer_once_every_rank_has_written_it() -> None:
    folder = Folder(frozenset({0, 1}), window=10.0)
    assert folder.feed([line(0, "x")], now=0.0) == []
    assert [f.ranks for f in folder.feed([line(1, "x")], now=0.1)] == [(0, 1)]


def test_a_single_rank_never_waits() -> None:
    assert [f.text for f in Folder(frozenset({0})).feed([line(0, "x"), line(0, "x")], now=0.0)] == ["x", "x"]


def test_a_copy_that_comes_late_is_shown_by_itself() -> None:
    folded = list(fold_history([line(0, "x", 1.0), line(1, "x", 1.1), line(2, "x", 9.0)], window=0.2))
    assert [f.ranks for f in folded] == [(0, 1), (2,)]


def test_repeated_lines_pair_up() -> None:
    folded = list(fold_history([line(0, ""), line(0, ""), line(1, ""), line(1, "")]))
    assert [f.ranks for f in folded] == [(0, 1), (0, 1)]


def test_a_frame_of_a_progress_bar_does_not_fold() -> None:
    folded = list(fold_history([line(0, "10%", partial=True), line(1, "10%", partial=True)]))
    assert [f.ranks for f in folded] == [(0,), (1,)]


def test_a_line_of_several_ranks_is_whole() -> None:
    (folded,) = fold_history([line(0, "x"), line(1, "x")])
    assert (folded.partial, folded.attempt, folded.time) == (False, 0, 0.0)


def test_no_more_than_so_many_lines_are_held_however_many_come_at_once() -> None:
    folder, lines = Folder(window=60.0), [line(0, str(number)) for number in range(50_000)]
    out = folder.feed(lines, now=0.0)
    assert 0 < 50_000 - len(out) <= 20_000
    assert [folded.text for folded in out + folder.flush()] == [one.text for one in lines]


def test_the_work_for_equal_lines_grows_as_their_number() -> None:
    few, many = ([line(0, "x")] * number for number in (20_000, 80_000))

    assert work(lambda: fold_alone(many), 3) < 8 * work(lambda: fold_alone(few), 3)


def fold_alone(lines: list[LogLine]) -> None:
    assert len(Folder(frozenset({0})).feed(lines, now=0.0)) == len(lines)


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
    folder, now = Folder(expected), 0.0
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
    folder, now = Folder(window=0.2), 0.0
    for lines, pause in feeds:
        now += pause
        folder.feed([line(r, t, now, partial=p) for r, t, p in lines], now)
        due = folder.next_due()
        assert due is None or due > now
