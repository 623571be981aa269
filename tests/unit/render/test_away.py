"""What is said of a node that does not answer: for how long, until when, and what its workers do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.render import run_messages
from clusterctl.render.run_list import render_ps
from clusterctl.render.status_report import RunSnapshot, render_run_summary
from clusterctl.run.rules.controller_events import LinkChanged
from clusterctl.run.rules.state import NodeState, RunPhase, RunState

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        pytest.param(
            {"why": "no answer", "seconds": 7.0, "lost_in": 113.0},
            "gpu03: no answer for 7 s; given up in 113 s (network.node_lost_after); its workers go on",
            id="its workers go on",
        ),
        pytest.param(
            {"why": "no answer", "seconds": 7.0, "lost_in": 113.0, "stop_in": 8.0},
            "gpu03: no answer for 7 s; given up in 113 s (network.node_lost_after);"
            " its workers are stopped there in 8 s (on_controller_loss.stop_after)",
            id="its workers are stopped",
        ),
        pytest.param(
            {"why": "gpu03: no sign of life for 15s", "seconds": 15.0},
            "gpu03: no answer for 15 s; its workers go on",
            id="no other node could be heard",
        ),
        pytest.param(
            {"why": "gpu03: connection refused"},
            "gpu03: no answer (connection refused); its workers go on",
            id="a connection that broke for a reason",
        ),
    ],
)
def test_a_node_that_does_not_answer_is_told_with_what_follows_and_when(link: dict[str, Any], expected: str) -> None:
    assert run_messages.unreachable_message(LinkChanged(node="gpu03", link="unreachable", **link)) == expected


def test_ps_names_the_nodes_that_cannot_be_reached(narrow: Terminal) -> None:
    nodes = {
        name: NodeState(node=name, node_rank=number, link="unreachable" if number else "connected")
        for number, name in enumerate(("gpu01", "gpu02", "gpu03"))
    }
    state = RunState(run="r-1", phase=RunPhase.RUNNING, attempt=0, nodes=nodes, created=1.0)

    (row,) = render_ps([RunSnapshot(state=state, has_controller=True)], 2.0, narrow, header=False)

    assert row.endswith("unreachable: gpu[02-03]")


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        pytest.param(90.0, "  attempt 1 begins in 10 s on gpu[01-02]", id="a pause"),
        pytest.param(100.0, "  attempt 1 begins once there is a connection to gpu[01-02]", id="the pause is over"),
    ],
)
def test_a_run_between_two_attempts_says_when_the_next_begins(narrow: Terminal, now: float, expected: str) -> None:
    state = RunState(
        run="r-1", phase=RunPhase.RESTARTING, attempt=0, restart_at=100.0, next_nodes=("gpu01", "gpu02"), created=1.0
    )

    assert render_run_summary(RunSnapshot(state=state, has_controller=True), now, narrow)[1:] == [expected]
