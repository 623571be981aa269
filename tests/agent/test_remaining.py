"""What is killed and will not go: what the kernel is at work on is waited for, what is stuck is named until it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux import proc
from tests.agent.conftest import gone
from tests.agent.hung import Hung, mounted
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent.conftest import Node

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="mounts and namespaces need root")


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Hung]:
    with mounted(tmp_path / "hung") as made:
        yield made


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def guest() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of ours inside a namespace of a worker, which keep the kernel from ending its first process."""
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for one in made:
        one.kill()
        one.wait()


def test_what_the_kernel_is_still_taking_apart_is_waited_for(node: Node, guest: list[subprocess.Popen[bytes]]) -> None:
    talk = node.launch(["unshare", "--pid", "--fork", "sleep", "1000"], grace=0.2)
    worker = talk.wait_for("started")[0]["pid"]
    (first,) = wait_for(lambda: children(worker), what="the first process of the namespace")
    # The first process of a PID namespace is gone when all of it are reaped. This one's parent is stopped and reaps none.
    guest.append(subprocess.Popen(["nsenter", "--target", str(first), "--pid", "sleep", "1000"]))
    (inner,) = wait_for(lambda: children(guest[0].pid), what="the guest")
    guest[0].send_signal(signal.SIGSTOP)

    node.stop(talk, grace=0.2)
    (alarm,) = talk.wait_for("alarm")
    before = talk.of("swept")
    guest[0].send_signal(signal.SIGCONT)
    swept = talk.wait_for("swept")[0]

    assert (alarm["code"], before) == ("slow_end", [])
    assert f"pid {first} (sleep)" in alarm["message"]
    assert swept["remaining"] == []
    assert gone(inner)


def test_what_was_stuck_is_told_to_be_gone_when_it_is(node: Node, hung: Hung) -> None:
    talk = node.launch(["stat", str(hung.folder / "x")], grace=0.2)
    worker = talk.wait_for("started")[0]["pid"]
    talk.eventually(hung.asked)
    node.stop(talk, grace=0.2)
    (swept,) = talk.wait_for("swept")
    assert [one["pid"] for one in swept["remaining"]] == [worker]
    assert proc.read_identity(worker)

    hung.end()

    _, again = talk.wait_for("swept", 2)
    assert again["remaining"] == []
