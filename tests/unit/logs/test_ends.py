"""The ends of ranks that failed stand where they were written, once, and count as lines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.protocol.events import Exited
from clusterctl.logs.failure_tails import FailureTails, read_failure_tails, read_folded_lines
from clusterctl.logs.log_line import LogQuery

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.logs.conftest import RunDir

TRACE = b"Traceback (most recent call last):\nValueError: bad\n"


@pytest.fixture
def crashed(run_dir: RunDir) -> Path:
    """Rank 0 writes at 1, 5 and 9; ranks 1 and 2 fail alike at 3 and 4, and are gone at 6."""
    for second, text in ((1.0, b"a\n"), (5.0, b"b\n"), (9.0, b"c\n")):
        run_dir.write("gpu01", 0, text, time=second)
    run_dir.write("gpu02", 1, TRACE, time=3.0)
    run_dir.write("gpu02", 2, TRACE, time=4.0)
    return run_dir.path


def shown(path: Path, **wanted: Any) -> list[tuple[tuple[int, ...], str]]:
    query = LogQuery(ranks=frozenset({0}), **wanted)
    exits = [("gpu02", 6.0, Exited(0, rank, exit_code=1, tail=TRACE.decode())) for rank in (1, 2)]
    ends = read_failure_tails(path, query, exits, FailureTails({0}))
    return [(line.ranks, line.text) for line in read_folded_lines(path, query, ends)]


HEAD, LAST = ((1, 2), "Traceback (most recent call last):"), ((1, 2), "ValueError: bad")
A, B, C = (((0,), text) for text in "abc")


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        pytest.param({}, [A, HEAD, LAST, B, C], id="all"),
        pytest.param({"tail": 2}, [B, C], id="two lines are two lines"),
        pytest.param({"tail": 3}, [LAST, B, C], id="the end of an end counts"),
        pytest.param({"tail": 9}, [A, HEAD, LAST, B, C], id="more than there are"),
        pytest.param({"tail": 0}, [], id="none"),
        pytest.param({"since": 4.5}, [B, C], id="since"),
        pytest.param({"grep": re.compile("bad|^c")}, [LAST, C], id="a pattern"),
        pytest.param({"attempt": 1}, [], id="another attempt"),
    ],
)
def test_ends_stand_in_their_place_and_fold(
    crashed: Path, wanted: dict[str, Any], expected: list[tuple[tuple[int, ...], str]]
) -> None:
    assert shown(crashed, **wanted) == expected


def test_as_many_lines_are_shown_as_were_asked_for_though_some_fold(run_dir: RunDir) -> None:
    for rank in range(4):
        run_dir.write("gpu01", rank, b"x\ny\nz\n", time=1.0)

    lines = read_folded_lines(run_dir.path, LogQuery(tail=3), [])

    assert [line.text for line in lines] == ["x", "y", "z"]


def test_an_end_of_which_nothing_is_here_stands_where_its_rank_was_gone(crashed: Path) -> None:
    exits = [("gpu02", 8.0, Exited(0, 3, exit_code=1, tail="only the node has it\n"))]

    (line,) = read_failure_tails(crashed, LogQuery(ranks=frozenset({0})), exits, FailureTails({0}))

    assert (line.time, line.text) == (8.0, "only the node has it")
