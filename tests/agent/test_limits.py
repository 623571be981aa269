"""Limits that a worker lives under, and that a look at the node tells of: the same."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux import spawn
from clusterctl.agent.protocol.command_messages import Command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent.conftest import Node

LOG = "attempt-0/rank-0.log"
TELL = ["sh", "-c", "ulimit -Sn; ulimit -Hn"]


@contextlib.contextmanager
def open_files(soft: int) -> Iterator[int]:
    """Start agents as a login does whose soft limit is low; yields the hard one."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield min(hard, spawn.MAX_OPEN_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


@pytest.mark.parametrize(
    ("prologue", "soft"), [(None, None), ("ulimit -Sn 300", "300")], ids=["by itself", "as the prologue says"]
)
def test_a_worker_may_open_as_many_files_as_its_hard_limit_allows(
    node: Node, prologue: str | None, soft: str | None
) -> None:
    with open_files(256) as hard:
        talk = node.launch(TELL, prologue=prologue)
    talk.wait_for("swept")
    talk.until(lambda: talk.files.get(LOG, b"").count(b"\n") == 2)
    assert talk.files[LOG].decode().split() == [soft or str(hard), str(hard)]


def test_a_look_tells_the_limit_that_a_worker_has(node: Node) -> None:
    with open_files(256) as hard:
        talk = node.talk()
    facts = talk.ask(Command.PROBE, request={"groups": ["host"]})
    assert facts["groups"]["host"]["data"]["nofile"] == hard
