"""A view that shows the end of what is not replicated yet, and then goes on without losing or repeating a line."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from clusterctl.logs.follow import Follower
from clusterctl.logs.line import LogQuery
from clusterctl.logs.unreplicated import LAG, WINDOW, Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conftest import RunDir

    from clusterctl.logs.line import LogLine
    from clusterctl.logs.output_files import OutputFile

LINES = 100_000


class Node:
    """A node with one output file, of which the head has nothing yet; stands in for a live controller."""

    def __init__(self, lines: int = LINES) -> None:
        self.data = b"".join(b"line %d\n" % number for number in range(lines))

    def piece(self, offset: int, length: int) -> Piece:
        return Piece("gpu01", 0, 0, offset, len(self.data), self.data[offset : offset + length])

    def ends(self) -> list[Piece]:
        return [self.piece(max(0, len(self.data) - WINDOW), WINDOW)]

    def beyond(self, places: Sequence[tuple[OutputFile, int]]) -> list[Piece]:
        return [self.piece(offset, WINDOW) for _, offset in places]


def numbers(lines: list[LogLine]) -> list[int]:
    return [int(line.text.split()[1]) for line in lines]


def view(run_dir: RunDir, node: Node, tail: int | None = 3) -> Follower:
    moments = itertools.count(100.0)
    return Follower(run_dir.path, LogQuery(tail=tail), source=node, frame_interval=None, clock=lambda: next(moments))


@pytest.mark.parametrize("replicated", [0, 1, LAG])
def test_the_last_lines_are_those_of_the_node_and_not_those_of_the_replica(run_dir: RunDir, replicated: int) -> None:
    node = Node()
    if replicated:
        run_dir.write("gpu01", 0, node.data[:replicated])

    assert numbers(list(view(run_dir, node).history())) == [LINES - 3, LINES - 2, LINES - 1]


def test_a_replica_that_is_near_is_read_itself(run_dir: RunDir) -> None:
    node = Node()
    run_dir.write("gpu01", 0, node.data[: len(node.data) - LAG])
    follower = view(run_dir, node, tail=2)

    (shown,) = numbers(list(follower.history()))

    assert shown < LINES - 3
    run_dir.write("gpu01", 0, node.data[len(node.data) - LAG :])
    assert numbers(follower.poll()) == list(range(shown + 1, LINES))


def test_what_comes_later_is_shown_once_while_the_replica_lags_and_after(
    run_dir: RunDir,
) -> None:
    node = Node()
    follower = view(run_dir, node)
    shown = numbers(list(follower.history()))

    node.data += b"line 100000\nline 100001\nline 10"
    shown += numbers(follower.poll())
    node.data += b"0002\nline 100003\n"
    run_dir.write("gpu01", 0, node.data[:1000])
    shown += numbers(follower.poll())
    run_dir.write("gpu01", 0, node.data[1000:], time=10.0)
    shown += numbers(follower.poll())
    node.data += b"line 100004\n"
    run_dir.write("gpu01", 0, b"line 100004\n", time=11.0)
    shown += numbers(follower.poll())

    assert shown == list(range(LINES - 3, LINES + 5))


def test_the_end_of_a_run_shows_all_that_was_read_ahead_of_no_replica(run_dir: RunDir) -> None:
    node = Node()
    follower = view(run_dir, node)
    shown = numbers(list(follower.history()))
    node.data += b"line 100000\n"
    run_dir.write("gpu01", 0, node.data, time=10.0)

    shown += numbers([line for lines in follower.finish() for line in lines])

    assert shown == list(range(LINES - 3, LINES + 1))


def test_a_view_of_everything_reads_replicas_alone(run_dir: RunDir) -> None:
    run_dir.write("gpu01", 0, b"line 1\n")

    assert numbers(list(view(run_dir, Node(), tail=None).history())) == [1]


def test_one_endless_line_is_shown_from_where_it_was_read(run_dir: RunDir) -> None:
    node = Node(0)
    node.data = b"x" * (2 * LAG)
    follower = view(run_dir, node)

    assert list(follower.history()) == []
    node.data += b"\n"
    run_dir.write("gpu01", 0, node.data, time=10.0)
    (line,) = follower.poll()

    assert set(line.text) == {"x"}
