"""The line for GPUs of a node, as sessions of several heads see it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.facts import claim_files
from clusterctl.agent.protocol.command_messages import Command
from tests.agent.talk import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

GPU = 860 + os.getpid() % 100
"""Of no other test that runs now."""
NOBODY: dict[str, Any] = {"holders": [], "ahead": []}


def asked(node: Node, number: int | None, *, claim: bool = False, gpu: int = GPU) -> dict[str, Any]:
    return {**node.where, "gpus": [gpu], "number": number, "claim": claim, "name": "llama", "head": "desk"}


def wait(node: Node, talk: Talk, number: int) -> dict[str, Any]:
    return talk.ask(Command.QUEUE, **asked(node, number))


def test_who_waits_is_told_once_the_head_that_held_the_gpu_is_gone(nodes: Callable[[], Node]) -> None:
    first, second, third = nodes(), nodes(), nodes()
    holder, waiter = first.talk(), second.talk()
    holder.ask(Command.QUEUE, **asked(first, 1, claim=True))
    held = f"GPU {GPU} is held by run {first.run} (node node.0)"
    assert wait(second, waiter, 2) == {"holders": [held], "ahead": [], "highest": 1}
    last = third.talk(idle=5.0)
    assert wait(third, last, 3) == {"holders": [held], "ahead": [f"run {second.run}"], "highest": 2}
    # The head of the third is as good as dead: nothing comes from it any more.
    last.process.wait(30)
    with pytest.raises(Refused, match="held by run"):
        waiter.ask(Command.QUEUE, **asked(second, 2, claim=True))
    again = waiter.post(Command.QUEUE, **asked(second, 2))
    assert waiter.answer(again)["holders"] == [held]
    told = waiter.post(Command.QUEUE, **asked(second, 2))

    holder.kill()

    assert waiter.answer(told) == {**NOBODY, "highest": 0}
    assert waiter.ask(Command.QUEUE, **asked(second, 2, claim=True))["holders"] == []
    # Without a number, the session gives back its place and its claim.
    assert waiter.ask(Command.QUEUE, **asked(second, None)) == {**NOBODY, "highest": 0}
    assert not [claim for claim in claim_files.collect_claims()["claims"] if claim["run"] in (second.run, third.run)]


def test_a_node_is_prepared_with_what_its_session_claimed_and_not_by_a_run_that_did_not_wait(
    nodes: Callable[[], Node],
) -> None:
    first, second, other = nodes(), nodes(), nodes()
    holder, waiter, plain = first.talk(), second.talk(), other.talk()
    holder.ask(Command.QUEUE, **asked(first, 1, claim=True))
    wait(second, waiter, 2)

    first.prepare(holder, gpus=[GPU])
    holder.close()

    told = waiter.ask(Command.QUEUE, **asked(second, None))
    assert told["holders"] == [f"GPU {GPU} is held by run {first.run} (node node.0)"]
    wait(second, waiter, 1)
    talk = first.talk()
    talk.ask(Command.FINISH, **first.where, state="succeeded", exit_code=0)
    with pytest.raises(
        Refused, match=rf"run {second.run} waits for GPU {GPU}; with `--wait`, this run waits behind it"
    ):
        other.prepare(plain, gpus=[GPU])
