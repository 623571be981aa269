"""Why attempts ended, and what followed them, as a person reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.render.attempt_table import describe_restart, render_attempts
from clusterctl.run.rules.controller_events import RestartPlanned
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.state import EarlierAttempt, RunPhase, RunState

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal

KILLED: dict[str, Any] = {
    "kind": "signal", "node": "gpu02", "rank": 1, "signal": "SIGKILL", "message": "killed by SIGKILL", "certain": True,
}  # fmt: skip
RAISED: dict[str, Any] = {"kind": "exit", "node": "gpu02", "rank": 1, "exit_code": 1, "message": "ValueError: bad"}


UNSAID = " (not by clusterctl, no OOM kill in the kernel log)"


@pytest.mark.parametrize(
    ("cause", "pause", "expected"),
    [
        pytest.param(
            KILLED,
            10.0,
            [
                f"first observed failure: rank 1 on gpu02, killed by SIGKILL{UNSAID}",
                "restart 1 of 3 in 10 s (rank 1 on gpu02: killed by SIGKILL)",
            ],
            id="a signal, and a pause",
        ),
        pytest.param(
            {"kind": "node_lost", "node": "gpu03", "rank": 2, "message": "node lost: no answer", "certain": True},
            0.0,
            [
                "first observed failure: rank 2 on gpu03: node lost: no answer",
                "restart 1 of 3 now (gpu03 was lost)",
            ],
            id="a node, at once",
        ),
        pytest.param({"kind": "fence"}, 2.0, ["restart 1 of 3 in 2 s (no controller was heard)"], id="no controller"),
        pytest.param({"kind": "stalled"}, 10.0, ["restart 1 of 3 in 10 s (stalled)"], id="no rank is to blame"),
        pytest.param(None, 10.0, ["restart 1 of 3 in 10 s (crash)"], id="a cause that nobody wrote down"),
    ],
)
def test_a_restart_is_told_with_what_was_to_blame(
    pipe: Terminal, cause: dict[str, Any] | None, pause: float, expected: list[str]
) -> None:
    event = RestartPlanned(attempt=1, why="crash", at=100.0 + pause, cause=cause, number=1, budget=3)

    assert describe_restart(100.0, event, pipe) == expected


def test_attempts_are_a_table_once_there_was_more_than_one(pipe: Terminal) -> None:
    past = EarlierAttempt(number=0, began=100.0, ended=292.0, why="crash", cause=Cause(**RAISED), step=412)
    state = RunState(
        phase=RunPhase.RUNNING, attempt=1, running_since=302.0, resume_from="ckpt/step-400", earlier_attempts=(past,)
    )

    assert render_attempts(state, 450, 364.0, pipe) == [
        "ATTEMPT   TOOK  STEPS  FROM           END",
        "      0  3m12s    412  -              rank 1 on gpu02: ValueError: bad (exit code 1)",
        "      1  1m02s    450  ckpt/step-400  running",
    ]


def test_one_attempt_alone_needs_no_table(pipe: Terminal) -> None:
    assert render_attempts(RunState(attempt=0, running_since=1.0), 3, 2.0, pipe) == []
