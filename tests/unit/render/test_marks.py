"""Which attempt the lines of a run are of, where there were several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.logs.log_line import LogLine
from clusterctl.render.attempt_table import AttemptSeparators
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.state import EarlierAttempt, RunState

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal

CAUSE = Cause(kind="signal", node="gpu02", rank=1, signal="SIGKILL", message="killed by SIGKILL")
PAST = tuple(EarlierAttempt(number=n, began=100.0 * n, ended=100.0 * n + 40, cause=CAUSE) for n in (0, 1))
STATE = RunState(attempt=2, earlier_attempts=PAST, resume_from="ckpt/step-9")
ENDED = ["── attempt 0 ended after 40s: rank 1 on gpu02: killed by SIGKILL ──"]
ENDED.append(ENDED[0].replace("attempt 0", "attempt 1"))
BEGUN = ["── attempt 0 ──", "── attempt 1 ──", "── attempt 2, from ckpt/step-9 ──"]


def shown(terminal: Terminal, attempts: list[int], state: RunState = STATE, **how: Any) -> list[str]:
    """The marks as they are, of lines the number of their attempt."""
    marks, out = AttemptSeparators(terminal, **how), list[str]()
    for piece in marks.insert_separators([LogLine(1.0, "n", 0, attempt, "x") for attempt in attempts], state):
        out += [piece] if isinstance(piece, str) else [str(line.attempt) for line in piece]
    return [*out, *marks.list_remaining_separators(state)]


@pytest.mark.parametrize(
    ("attempts", "how", "expected"),
    [
        pytest.param(
            [0, 0, 1, 2], {}, [BEGUN[0], "0", "0", ENDED[0], BEGUN[1], "1", ENDED[1], BEGUN[2], "2"], id="all"
        ),
        pytest.param([2], {}, [BEGUN[0], ENDED[0], BEGUN[1], ENDED[1], BEGUN[2], "2"], id="two without a line"),
        pytest.param([0], {}, [BEGUN[0], "0", ENDED[0], BEGUN[1], ENDED[1], BEGUN[2]], id="the last without a line"),
        pytest.param([1, 2], {"first": False}, [BEGUN[1], "1", ENDED[1], BEGUN[2], "2"], id="a tail"),
        pytest.param([], {"attempt": 0}, [BEGUN[0], ENDED[0]], id="one that wrote nothing"),
        pytest.param([1], {"attempt": 1}, [BEGUN[1], "1", ENDED[1]], id="one of them"),
    ],
)
def test_marks_say_what_begins_and_why_the_one_before_ended(
    pipe: Terminal, attempts: list[int], how: dict[str, Any], expected: list[str]
) -> None:
    assert shown(pipe, attempts, **how) == expected


def test_one_attempt_alone_is_not_marked(pipe: Terminal) -> None:
    assert shown(pipe, [0, 0], RunState(attempt=0)) == ["0", "0"]
