"""A run that stalls again and again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.command_messages import Command

if TYPE_CHECKING:
    from tests.agent.conftest import Node

STALLS = 14


def test_a_node_keeps_the_evidence_of_the_first_stalls_and_of_the_last(node: Node) -> None:
    talk = node.launch(["sleep", "1000"])
    talk.wait_for("started")
    for number in range(1, STALLS + 1):
        talk.ask(Command.EVIDENCE, **node.where, name=f"stall-{number}")
    talk.ask(Command.EVIDENCE, **node.where, name="asked")
    kept = [f"stall-{number}" for number in (1, 2, *range(STALLS - 7, STALLS + 1))]
    assert sorted(os.listdir(node.folder / "evidence")) == sorted([*kept, "asked"])
