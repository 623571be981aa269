"""GPUs that a person holds without a run, for a limited time."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.facts import claim_files
from clusterctl.agent.protocol.command_messages import Command
from tests.agent.talk import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

GPU = 640 + os.getpid() % 100
"""Of no other test that runs now."""
HEAD = f"desk-{os.getpid()}"


def reserve(talk: Talk, seconds: float, *, head: str = HEAD, **more: Any) -> int:
    asked = {"node": "node.0", "gpus": [GPU], "seconds": seconds, "name": "llama", "head": head, "note": "", **more}
    return int(talk.ask(Command.RESERVE, **asked)["ended"])


def holders(node: Node, talk: Talk, *, head: str = "elsewhere") -> list[str]:
    about = {"gpus": [GPU], "number": None, "claim": False, "name": "other", "head": head}
    told: list[str] = talk.ask(Command.QUEUE, **node.where, **about)["holders"]
    return told


def mine() -> list[dict[str, Any]]:
    return [claim for claim in claim_files.collect_claims()["claims"] if claim.get("head") == HEAD]


@pytest.fixture(autouse=True)
def _release(node: Node) -> Iterator[None]:
    yield
    with node.talk() as talk:
        reserve(talk, 0)


def test_a_reservation_is_seen_by_all_and_used_by_its_owner_alone(node: Node, nodes: Callable[[], Node]) -> None:
    other = nodes()
    talk, theirs = node.talk(), other.talk()
    assert reserve(talk, 900, note="paper\x1b[2J") == 0
    talk.kill()

    (told,) = holders(other, theirs)
    assert told.startswith(f"GPU {GPU} is reserved by ")
    assert told.endswith(": paper?[2J")
    assert " until 20" in told
    (seen,) = mine()
    assert (seen["kind"], seen["name"], seen["note"]) == ("reservation", "llama", "paper?[2J")
    assert seen["until"] - seen["since"] == 900
    with pytest.raises(Refused, match=f"GPU {GPU} is reserved by"):
        other.prepare(theirs, gpus=[GPU], head="elsewhere")
    with pytest.raises(Refused, match=f"GPU {GPU} is reserved by"):
        reserve(theirs, 5, head="elsewhere")
    owner = node.talk()
    assert holders(node, owner, head=HEAD) == []
    node.prepare(owner, gpus=[GPU], head=HEAD)
    assert reserve(owner, 0) == 1

    assert holders(other, theirs) == [f"GPU {GPU} is held by run {node.run} (node node.0)"]


def test_a_reservation_ends_by_itself_though_its_head_is_gone(node: Node) -> None:
    talk, other = node.talk(), node.talk()
    reserve(talk, 2)
    talk.kill()

    other.eventually(lambda: not mine())
    assert holders(node, other) == []


def test_a_later_reservation_replaces_an_earlier_one_and_both_can_be_given_back(node: Node) -> None:
    talk = node.talk()
    assert reserve(talk, 600, note="first") == 0
    assert reserve(talk, 900, note="second") == 1
    assert [claim["note"] for claim in mine()] == ["second"]

    assert reserve(talk, 0) == 1
    assert mine() == []
    assert holders(node, talk) == []


def test_a_reservation_whose_process_is_killed_blocks_nobody(node: Node) -> None:
    talk = node.talk()
    reserve(talk, 600)
    (record,) = [record for record in claim_files.list_records() if record.is_reservation_of(HEAD)]

    os.kill(record.fields["pid"], signal.SIGKILL)
    talk.eventually(lambda: holders(node, talk) == [])
    assert mine() == []


def test_two_runs_of_the_owner_share_no_gpu_of_the_reservation(node: Node, nodes: Callable[[], Node]) -> None:
    other = nodes()
    talk, second = node.talk(), other.talk()
    reserve(talk, 600)
    node.prepare(talk, gpus=[GPU], head=HEAD)

    with pytest.raises(Refused, match=f"GPU {GPU} is held by run {node.run}"):
        other.prepare(second, gpus=[GPU], head=HEAD)
