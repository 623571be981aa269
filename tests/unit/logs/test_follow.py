from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.logs.follow import LogFollower
from clusterctl.logs.log_line import LogQuery

if TYPE_CHECKING:
    from conftest import RunDir

    from clusterctl.logs.log_line import LogLine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rest(follower: LogFollower) -> list[LogLine]:
    return [line for lines in follower.finish() for line in lines]


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def test_goes_on_where_the_history_ended(run_dir: RunDir) -> None:
    run_dir.write("gpu01", 0, b"1\n2\n3\nbeg", time=10.0)
    follower = LogFollower(run_dir.path, LogQuery(tail=3), frame_interval=None)
    assert texts(list(follower.history())) == ["2", "3"]
    assert follower.poll() == []
    run_dir.write("gpu01", 0, b"un\nnext\n", time=11.0)
    assert texts(follower.poll()) == ["begun", "next"]
    assert follower.poll() == []


def test_ranks_and_attempts_that_begin_later_are_followed(run_dir: RunDir) -> None:
    follower = LogFollower(run_dir.path, LogQuery(), frame_interval=None)
    assert list(follower.history()) == []
    run_dir.write("gpu02", 1, b"late\nunfin", time=10.0)
    assert texts(follower.poll()) == ["late"]
    run_dir.write("gpu02", 1, b"again\n", time=20.0, attempt=1)
    assert [(line.attempt, line.text) for line in follower.poll()] == [(0, "unfin"), (1, "again")]
    assert follower.poll() == []


def test_lines_that_the_index_does_not_know_yet_are_new(run_dir: RunDir) -> None:
    follower = LogFollower(run_dir.path, LogQuery(), clock=Clock())
    run_dir.write("gpu01", 0, b"fresh\n")
    assert [line.time for line in follower.poll()] == [100.0]


def test_a_progress_bar_shows_one_frame_per_interval(run_dir: RunDir) -> None:
    clock = Clock()
    follower = LogFollower(run_dir.path, LogQuery(), frame_interval=1.0, clock=clock)
    run_dir.write("gpu01", 0, b"\r10%")
    assert [(line.text, line.partial) for line in follower.poll()] == [("10%", True)]
    run_dir.write("gpu01", 0, b"\r20%")
    clock.now += 0.5
    assert follower.poll() == []
    run_dir.write("gpu01", 0, b"\r30%")
    clock.now += 0.5
    assert texts(follower.poll()) == ["30%"]
    run_dir.write("gpu01", 0, b"\r100%\n")
    assert [(line.text, line.partial) for line in follower.poll()] == [("100%", False)]


def test_a_line_in_the_making_is_not_shown_twice(run_dir: RunDir) -> None:
    clock = Clock()
    follower = LogFollower(run_dir.path, LogQuery(), clock=clock)
    run_dir.write("gpu01", 0, b"half")
    assert follower.poll() == []
    clock.now += 5.0
    assert follower.poll() == []
    assert texts(rest(follower)) == ["half"]


def test_the_pattern_counts_while_following(run_dir: RunDir) -> None:
    follower = LogFollower(run_dir.path, LogQuery(grep=re.compile("loss")), frame_interval=None)
    run_dir.write("gpu01", 0, b"\x1b[1mlo\x1b[0mss 1\nother\nloss 2\n")
    assert len(follower.poll()) == 2


def test_finish_shows_the_unfinished_last_line(run_dir: RunDir) -> None:
    follower = LogFollower(run_dir.path, LogQuery(), frame_interval=None)
    run_dir.write("gpu01", 0, b"a\nb")
    assert texts(rest(follower)) == ["a", "b"]
    assert rest(follower) == []


def test_a_flood_is_taken_in_portions_and_starves_nobody(run_dir: RunDir) -> None:
    follower = LogFollower(run_dir.path, LogQuery(), frame_interval=None)
    run_dir.write("gpu01", 0, b"flood\n" * 2_000_000)
    run_dir.write("gpu02", 1, b"quiet\n")
    seen = follower.poll()
    assert follower.more
    seen += follower.poll()
    assert "quiet" in texts(seen)
    assert not [line for line in seen if line.partial]
    portions = [len(lines) for lines in follower.finish()]
    assert len(seen) + sum(portions) == 2_000_001
    assert max(portions) < 200_000


def test_a_clock_that_turns_out_to_be_ahead_is_corrected_from_then_on(run_dir: RunDir) -> None:
    ahead = {"gpu01": 0.0, "gpu02": 0.0}
    follower = LogFollower(run_dir.path, LogQuery(), skew=ahead.__getitem__, frame_interval=None)
    run_dir.write("gpu01", 0, b"a1\n", time=10.0)
    run_dir.write("gpu02", 1, b"b1\n", time=15.0)
    assert [(line.text, line.time) for line in follower.poll()] == [("a1", 10.0), ("b1", 15.0)]

    ahead["gpu02"] = 5.0
    run_dir.write("gpu01", 0, b"a2\n", time=30.0)
    run_dir.write("gpu02", 1, b"b2\n", time=34.0)
    assert [(line.text, line.time) for line in follower.poll()] == [("b2", 29.0), ("a2", 30.0)]
