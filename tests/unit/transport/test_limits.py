"""How long a node may take for what it is asked."""

from __future__ import annotations

import pytest

from clusterctl.agent.protocol.command_messages import Command
from clusterctl.session.request_definitions import REQUESTS


@pytest.mark.parametrize(
    ("command", "seconds"),
    [
        pytest.param(Command.LISTEN, 10.0, id="a port: somebody waits to connect to it"),
        pytest.param(Command.STATUS, 20.0, id="a word"),
        pytest.param(Command.ROUTES, 60.0, id="names to resolve"),
        pytest.param(Command.START, 60.0, id="workers to start"),
    ],
)
def test_a_node_has_as_long_for_an_answer_as_its_work_takes(command: Command, seconds: float) -> None:
    assert REQUESTS[command].timeout_s == seconds
