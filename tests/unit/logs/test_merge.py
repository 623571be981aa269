from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.logs.log_line import LogLine, LogQuery
from clusterctl.logs.merge import read_lines
from clusterctl.logs.safe_text import LINE_LIMIT
from tests.work import work

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import RunDir


def texts(run_dir: RunDir, **query: object) -> list[str]:
    return [line.text for line in read_lines(run_dir.path, LogQuery(**query))]  # type: ignore[arg-type]


@pytest.fixture
def two_ranks(run_dir: RunDir) -> RunDir:
    run_dir.write("gpu01", 0, b"a1\na2\n", time=10.0)
    run_dir.write("gpu02", 1, b"b1\n", time=10.5)
    run_dir.write("gpu01", 0, b"a3\n", time=11.0)
    run_dir.write("gpu02", 1, b"b2\nb3\n", time=12.0)
    return run_dir


def test_lines_of_several_ranks_come_in_the_order_of_time(two_ranks: RunDir) -> None:
    assert list(read_lines(two_ranks.path, LogQuery())) == [
        LogLine(10.0, "gpu01", 0, 0, "a1"),
        LogLine(10.0, "gpu01", 0, 0, "a2"),
        LogLine(10.5, "gpu02", 1, 0, "b1"),
        LogLine(11.0, "gpu01", 0, 0, "a3"),
        LogLine(12.0, "gpu02", 1, 0, "b2"),
        LogLine(12.0, "gpu02", 1, 0, "b3"),
    ]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        pytest.param({"ranks": frozenset({1})}, ["b1", "b2", "b3"], id="rank"),
        pytest.param({"nodes": frozenset({"gpu01"})}, ["a1", "a2", "a3"], id="node"),
        pytest.param({"attempt": 1}, [], id="attempt"),
        pytest.param({"since": 10.5}, ["b1", "a3", "b2", "b3"], id="since"),
        pytest.param({"since": 10.6}, ["a3", "b2", "b3"], id="since between records"),
        pytest.param({"until": 11.0}, ["a1", "a2", "b1", "a3"], id="until"),
        pytest.param({"since": 10.5, "until": 11.0}, ["b1", "a3"], id="since and until"),
        pytest.param({"since": 99.0}, [], id="since after the end"),
        pytest.param({"grep": re.compile("[ab]3")}, ["a3", "b3"], id="grep"),
        pytest.param({"tail": 0}, [], id="tail of none"),
        pytest.param({"tail": 2}, ["b2", "b3"], id="tail"),
        pytest.param({"tail": 4}, ["b1", "a3", "b2", "b3"], id="tail over the merge"),
        pytest.param({"tail": 99}, ["a1", "a2", "b1", "a3", "b2", "b3"], id="tail of more than there is"),
        pytest.param({"tail": 1, "grep": re.compile("1")}, ["b1"], id="tail of what the pattern leaves"),
        pytest.param({"tail": 2, "until": 11.0}, ["b1", "a3"], id="tail before a time"),
    ],
)
def test_selects_lines(two_ranks: RunDir, query: dict[str, object], expected: list[str]) -> None:
    assert texts(two_ranks, **query) == expected


def test_a_clock_that_is_ahead_is_corrected(two_ranks: RunDir) -> None:
    lines = list(read_lines(two_ranks.path, LogQuery(), skew={"gpu01": 0.0, "gpu02": 5.0}.__getitem__))
    assert [line.text for line in lines] == ["b1", "b2", "b3", "a1", "a2", "a3"]
    assert lines[0].time == 5.5


def test_attempts_follow_each_other(run_dir: RunDir) -> None:
    run_dir.write("gpu01", 0, b"first\n", time=10.0, attempt=0)
    run_dir.write("gpu01", 0, b"second\n", time=20.0, attempt=1)
    assert texts(run_dir) == ["first", "second"]


def test_the_last_line_without_end_is_shown(run_dir: RunDir) -> None:
    run_dir.write("gpu01", 0, b"whole\npart", time=10.0)
    assert [(line.text, line.partial) for line in read_lines(run_dir.path, LogQuery())] == [
        ("whole", False),
        ("part", True),
    ]


def test_a_clock_that_steps_back_does_not_reorder_a_file(run_dir: RunDir) -> None:
    for time, text in ((10.0, b"1\n"), (5.0, b"2\n"), (11.0, b"3\n")):
        run_dir.write("gpu01", 0, text, time=time)
    run_dir.write("gpu01", 1, b"other\n", time=10.5)
    assert texts(run_dir) == ["1", "2", "other", "3"]


def test_a_file_without_index_is_read_all_the_same(run_dir: RunDir) -> None:
    run_dir.write("gpu01", 0, b"x\ny\n")
    assert texts(run_dir) == ["x", "y"]


def test_a_torn_index_record_is_ignored(run_dir: RunDir) -> None:
    run_dir.write("gpu01", 0, b"x\n", time=10.0)
    with (run_dir.log("gpu01", 0).with_suffix(".idx")).open("ab") as file:
        file.write(b"\x01\x02\x03")
    assert texts(run_dir, since=9.0) == ["x"]


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "missing", LogQuery(tail=5))) == []


def test_a_hole_at_the_beginning_is_named_and_stepped_over(run_dir: RunDir) -> None:
    path = run_dir.log("gpu01", 0)
    with path.open("wb") as file:
        file.seek(1_000_100)
        file.write(b"torn end\nwhole\n")
    run_dir.mark("gpu01", 0, path.stat().st_size, 10.0)
    assert texts(run_dir) == ["[1,000,100 bytes of output are gone here]", "torn end", "whole"]


def test_a_hole_in_the_middle_is_named_and_stepped_over(run_dir: RunDir) -> None:
    path = run_dir.log("gpu01", 0)
    with path.open("wb") as file:
        file.write(b"before\nbegun")
        file.seek(100_000)
        file.write(b"after\n")
    assert texts(run_dir) == ["before", "begun", "[99,988 bytes of output are gone here]", "after"]


def test_a_tail_ends_at_a_hole(run_dir: RunDir) -> None:
    with run_dir.log("gpu01", 0).open("wb") as file:
        file.seek(100_000_000)
        file.write(b"1\n2\n")
    assert texts(run_dir, tail=1) == ["2"]
    assert texts(run_dir, tail=50)[-2:] == ["1", "2"]


def test_a_line_of_ten_megabytes_is_cut_with_a_note(run_dir: RunDir) -> None:
    run_dir.write("gpu01", 0, b"x" * 10_000_000 + b"\nnext\n", time=10.0)
    long, after = texts(run_dir)
    assert len(long) < LINE_LIMIT + 100
    assert long.endswith("x … [10,000,000 bytes in this line]")
    assert after == "next"


def test_a_progress_bar_of_many_megabytes_shows_its_last_frame(run_dir: RunDir) -> None:
    frames = b"".join(b"\r%8d/999999 [=====>     ]" % k for k in range(100_000))
    run_dir.write("gpu01", 0, frames + b"\ndone\n", time=10.0)
    assert texts(run_dir) == ["   99999/999999 [=====>     ]", "done"]


def test_the_tail_of_a_huge_file_is_read_from_its_end(run_dir: RunDir) -> None:
    path = run_dir.log("gpu01", 0)
    path.touch()
    os.truncate(path, 50 * 1024**3)  # all of it would take minutes
    run_dir.write("gpu01", 0, b"\n1\n2\n3\n", time=10.0)
    assert texts(run_dir, tail=2) == ["2", "3"]


def test_raw_lines_are_byte_exact(run_dir: RunDir) -> None:
    data = b"\x1b[2J\xff\r\n\n" + b"y" * 700_000 + b"\xc3\nend"
    run_dir.write("gpu01", 0, data, time=10.0)
    lines = read_lines(run_dir.path, LogQuery(raw=True))
    assert (
        b"".join(line.text.encode("utf-8", "surrogateescape") + (b"" if line.partial else b"\n") for line in lines)
        == data
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.binary(max_size=12).filter(lambda b: b"\n" not in b), st.booleans()),
        max_size=40,
    ),
    st.integers(0, 45),
)
def test_a_tail_is_the_end_of_the_whole(
    new_run_dir: Callable[[], RunDir], writes: list[tuple[int, bytes, bool]], tail: int
) -> None:
    run_dir = new_run_dir()
    for time, (rank, text, marked) in enumerate(writes):
        run_dir.write("n", rank, text + b"\n", time=float(time) if marked else None)
    whole = list(read_lines(run_dir.path, LogQuery()))
    assert len(whole) == len(writes)
    assert list(read_lines(run_dir.path, LogQuery(tail=tail))) == whole[len(whole) - min(tail, len(whole)) :]


def test_lines_since_a_moment_are_found_without_reading_all_before(new_run_dir: Callable[[], RunDir]) -> None:
    def written(lines: int) -> RunDir:
        run_dir = new_run_dir()
        run_dir.write("gpu01", 0, b"early\n" * lines, time=10.0)
        run_dir.write("gpu01", 0, b"late\n", time=20.0)
        return run_dir

    few, many = written(10_000), written(2_000_000)
    assert texts(many, since=15.0) == ["late"]
    assert work(lambda: texts(many, since=15.0)) < 8 * work(lambda: texts(few, since=15.0))
