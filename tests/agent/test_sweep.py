"""What a run leaves behind is found whatever it does to itself, and nothing else is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent import proc, sweep
from clusterctl.agent.marks import Marks
from clusterctl.agent.proc import Identity
from tests.agent.conftest import BIN, gone

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent.conftest import Node

STRAY = [sys.executable, str(BIN / "stray.py")]


@pytest.mark.parametrize("mode", ["exec", "title"])
def test_a_stray_that_shook_off_everything_is_swept_after_a_good_end(node: Node, mode: str) -> None:
    report = node.home / "stray"
    talk = node.launch([*STRAY, str(report), mode], grace=0.3)
    talk.wait_for("swept")
    assert gone(int(report.read_text()))
    assert talk.of("swept")[0]["killed"] == 1
    assert talk.of("swept")[0]["remaining"] == []


def test_a_stray_is_swept_with_supervisor_and_waiter_dead(node: Node) -> None:
    report = node.home / "stray"
    talk = node.launch([*STRAY, str(report), "exec", "stay"])
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log") == b"stray is out\n")
    talk.kill()
    os.kill(node.supervisor(), 9)
    os.kill(node.waiter(), 9)
    os.kill(talk.of("started")[0]["pid"], 9)
    again = node.talk(epoch=2)
    node.stop(again, grace=0.5)
    node.follow(again)
    again.wait_for("swept")
    assert gone(int(report.read_text()))


def test_decoys_are_not_touched(nodes: Callable[[], Node]) -> None:
    node, neighbour = nodes(), nodes()
    report = neighbour.home / "stray"
    other = neighbour.launch([*STRAY, str(report), "title", "stay"])
    other.until(lambda: other.files.get("attempt-0/rank-0.log"))
    env = {**os.environ, "CLUSTERCTL_RUN_ID": node.run, "CLUSTERCTL_NODE": "another"}
    decoys = [
        subprocess.Popen([*STRAY, str(node.home / "own"), "title", "stay"], stdout=subprocess.DEVNULL),
        subprocess.Popen(["sleep", "1000"], env=env, start_new_session=True),
        subprocess.Popen(["sleep", "1000"], cwd=node.home),
    ]
    try:
        talk = node.launch([*STRAY, str(node.home / "stray"), "title", "stay"])
        talk.until(lambda: talk.files.get("attempt-0/rank-0.log"))
        decoys.append(subprocess.Popen(["tail", "-f", node.folder / "attempt-0/rank-0.log"], stdout=subprocess.DEVNULL))
        node.stop(talk, grace=0.2)
        talk.wait_for("swept")
        assert [decoy.poll() for decoy in decoys] == [None] * len(decoys)
        assert not gone(int(report.read_text()))
        assert not gone(int((node.home / "own").read_text()))
        assert not other.of("exited")
    finally:
        for decoy in decoys:
            decoy.kill()
            decoy.wait()
        os.kill(int((node.home / "own").read_text()), 9)


def test_a_pid_that_is_used_again_is_not_the_worker() -> None:
    decoy = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        found = proc.stat(decoy.pid)
        assert found is not None
        earlier = Identity(decoy.pid, found.start_time - 100)
        ledger = sweep.Ledger(workers={earlier: found.start_time - 10})
        marks = Marks(b"run", b"node", 1 << 60 | 12345, "/no/such/folder", os.getuid())
        assert sweep.find(marks, ledger) == []
        assert not proc.alive(earlier)
    finally:
        decoy.kill()
        decoy.wait()


def test_children_left_by_a_crashed_worker_are_swept(node: Node) -> None:
    script = f"sleep 1000 & echo $! > {node.home}/child; exit 1"
    talk = node.launch(["/bin/sh", "-c", script])
    talk.wait_for("swept")
    assert gone(int((node.home / "child").read_text()))
    assert talk.exits()[0]["exit_code"] == 1
