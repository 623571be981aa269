"""A rank that ends with 0 because of a signal that somebody else sent is told of."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.protocol.command_messages import Command

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

HANDLES = """
import os, signal, sys, time
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
open('pid.new', 'w').write(str(os.getpid()))
os.rename('pid.new', 'pid')
while not got: time.sleep(0.01)
"""


def begin(node: Node, script: str, shell: str) -> tuple[Talk, int]:
    """Start a rank and wait until its Python is up; return how to talk to its node, and the pid of its Python."""
    work = node.home / "work"
    work.mkdir()
    (work / "train.py").write_text(script)
    talk = node.talk()
    node.prepare(talk, 1)
    node.follow(talk)
    argv = ["bash", "-c", shell.replace("python", shlex.quote(sys.executable))]
    worker = {"rank": 0, "local_rank": 0, "argv": argv, "env": {"RANK": "0"}}
    talk.ask(Command.START, **node.where, attempt=0, workers=[worker], inject=True)
    place: Path = work / "pid"
    talk.eventually(place.exists)
    return talk, int(place.read_text())


@pytest.mark.parametrize(
    ("shell", "end"),
    [
        pytest.param("exec python train.py", "class Stop(SystemExit): pass\nraise Stop()", id="system_exit"),
        pytest.param("exec python train.py", "os._exit(0)", id="quick_exit"),
        pytest.param("python train.py | cat", "sys.exit(0)", id="below_a_shell"),
    ],
)
def test_a_rank_that_ends_with_0_for_a_signal_of_somebody_else_says_so(node: Node, shell: str, end: str) -> None:
    talk, pid = begin(node, HANDLES + end, shell)
    os.kill(pid, signal.SIGTERM)
    talk.wait_for("swept")
    event = talk.exits()[0]
    assert (event["exit_code"], event["stopped"]) == (0, False)
    assert event["outside_signal"]["signal"] == signal.SIGTERM
    assert 0 <= event["outside_signal"]["before_s"] < 60


def test_a_rank_that_we_have_stopped_says_nothing_of_the_signal(node: Node) -> None:
    talk, _ = begin(node, HANDLES, "exec python train.py")
    node.stop(talk, grace=30.0)
    talk.wait_for("swept")
    event = talk.exits()[0]
    assert (event["exit_code"], event["stopped"], event["outside_signal"]) == (0, True, None)
