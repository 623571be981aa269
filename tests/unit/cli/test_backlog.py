"""Where the events of the past stand among the lines of a run."""

from __future__ import annotations

from datetime import datetime

import pytest

from clusterctl.cli.follow.event_backlog import EventBacklog, format_event_with_time
from clusterctl.logs.log_line import LogLine

NOON = datetime(2026, 3, 4, 12, 0, 0).astimezone().timestamp()


def line(second: float, text: str) -> LogLine:
    return LogLine(NOON + second, "gpu01", 0, 0, text)


LINES = [line(10, "a"), line(20, "b"), line(30, "c")]


def shown(past: EventBacklog, most: int, lines: list[LogLine] = LINES) -> list[str]:
    """Lines as their text, events as theirs, without dates."""
    pieces = list(past.merge_with_output(lines, most))
    texts = [[piece.split(" ")[-1]] if isinstance(piece, str) else [line.text for line in piece] for piece in pieces]
    return [text for one in texts for text in one]


@pytest.mark.parametrize(
    ("seconds", "most", "expected"),
    [
        pytest.param([15], 3, ["a", "@15", "b", "c"], id="at its time"),
        pytest.param([40, 25], 3, ["a", "b", "@25", "c", "@40"], id="in order, and at the end"),
        pytest.param([5], 3, ["a", "b", "c"], id="not before a tail that was cut"),
        pytest.param([5], 4, ["@5", "a", "b", "c"], id="from the begin where all lines are shown"),
        pytest.param([11, 12, 13, 14, 15], 3, ["a", "@13", "@14", "@15", "b", "c"], id="as many as lines"),
        pytest.param([15], 0, ["a", "b", "c"], id="none where no line is wanted"),
    ],
)
def test_events_stand_among_the_lines_of_their_time(seconds: list[float], most: int, expected: list[str]) -> None:
    past = EventBacklog()
    for second in seconds:
        past.add_event(NOON + second, f"@{second}")

    assert shown(past, most) == expected


def test_the_ends_of_other_ranks_stand_at_their_time() -> None:
    past = EventBacklog()
    past.add_failure_tails([line(25, "the end of rank 1"), line(5, "too old")])

    assert shown(past, 3) == ["a", "b", "the end of rank 1", "c"]


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        pytest.param(60.0, "12:00:00 gpu03: connected again", id="today"),
        pytest.param(86400.0, "Mar 4 12:00:00 gpu03: connected again", id="another day"),
    ],
)
def test_an_event_of_another_day_is_told_with_its_day(later: float, expected: str) -> None:
    assert format_event_with_time(NOON, "gpu03: connected again", NOON + later) == expected
