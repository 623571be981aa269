"""However a fork ends before its rank has started: the reason is told, and the rank starts anew with a clean output."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.forkserver import server
from tests.agent.started import Job, Ran
from tests.agent.talk import Refused
from tests.agent.test_start_methods import installed, path_of

if TYPE_CHECKING:
    from tests.agent.conftest import Node


def test_what_waiter_and_rank_read_at_once_has_no_place_of_its_own() -> None:
    request = os.memfd_create("request")
    try:
        os.write(request, json.dumps({"argv": ["python"]}).encode())
        os.lseek(request, 3, os.SEEK_SET)
        assert server._read_json(request) == {"argv": ["python"]}
        assert os.lseek(request, 0, os.SEEK_CUR) == 3
    finally:
        os.close(request)


def reasons(node: Node, special: str, ranks: int = 1) -> list[str]:
    """Why ranks are not forked where this is imported; they do their work all the same."""
    installed(node, "special", special)
    job = Job(node, "fork", "train.py", env=path_of(node), preload=["special"])
    job.write("train.py", "print('ran')\n")
    talk = node.talk()
    job.prepare(talk, ranks)
    node.follow(talk)
    job.begin(talk, ranks)
    talk.wait_for("swept")
    ran = Ran(talk, node.folder)
    assert [(ran.code(n), ran.said(n)) for n in range(ranks)] == [(0, "ran\n")] * ranks
    alarms = talk.of("alarm")
    assert {(alarm["code"], alarm["severity"]) for alarm in alarms} == {("not_forked", "warn")}
    return [alarm["message"].removeprefix("not forked, but started as new processes: ") for alarm in alarms]


FAILS_AT = """
import errno, os
real, depth = os.fork, 0
def fork():
    global depth
    if depth == {depth}:
        {what}
    pid = real()
    depth += pid == 0
    return pid
os.fork = fork
"""
NO_PROCESS = "raise OSError(errno.EAGAIN, 'no process is to be had')"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_process_that_is_not_to_be_had(node: Node, depth: int) -> None:
    (why,) = reasons(node, FAILS_AT.format(depth=depth, what=NO_PROCESS))
    assert "rank 0 could not be forked: " in why
    assert "no process is to be had" in why


def test_a_forkserver_that_is_killed_while_it_forks(node: Node) -> None:
    first, *_ = reasons(node, FAILS_AT.format(depth=0, what=f"os.kill(os.getpid(), {signal.SIGKILL:d})"), 2)
    assert first.startswith("the process that was to fork the ranks has ended")


def test_a_forkserver_that_fails_while_it_forks(node: Node) -> None:
    (why,) = reasons(node, FAILS_AT.format(depth=0, what="raise RuntimeError('confused')"))
    assert why.startswith("RuntimeError: confused (special.py:")


def test_a_forkserver_that_says_why_it_ends(node: Node) -> None:
    (why,) = reasons(node, "import os\nos.write(2, b'OMP: Error #15: two of them\\n')\nos.abort()\n")
    assert why == "the process that was to fork the ranks has ended; its last line: OMP: Error #15: two of them"


def test_a_rank_that_cannot_become_what_it_shall_be(node: Node) -> None:
    folder = node.home / "site-packages/numpy"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "random.py").write_text("def seed():\n    raise ValueError('no entropy')\n")
    (why,) = reasons(node, "import numpy.random\n")
    assert why == "rank 0 could not be forked: ValueError: no entropy (random.py:2)"


WAITER = """
import os, sys
real = os.execve
def execve(path, argv, env):
    {what}
    real(path, argv, env)
os.execve = execve
"""


@pytest.mark.parametrize(
    ("what", "why"),
    {
        "raise FileNotFoundError(2, 'no interpreter')": "FileNotFoundError: [Errno 2] no interpreter",
        "argv[1:] = ['/nowhere/agent', 'wait']": "can't open file '/nowhere/agent'",
        "argv[-1] = 'what'": "rank 0 could not be forked: ValueError",
        "import signal; os.kill(os.getpid(), signal.SIGKILL)": "or its waiter was killed before the waiter sent a report",
    }.items(),
)
def test_a_waiter_that_cannot_be(node: Node, what: str, why: str) -> None:
    (said,) = reasons(node, WAITER.format(what=what))
    assert why in said


def test_limits_that_imports_set(node: Node) -> None:
    (why,) = reasons(node, "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))\n")
    assert why == "an imported module has changed its limits"


def test_a_rank_that_another_waiter_has_is_not_started_twice(node: Node) -> None:
    job = Job(node, "fork", "train.py")
    job.write("train.py", "print('ran')\n")
    talk = node.talk()
    job.prepare(talk)
    (node.folder / "attempt-0/rank-0.spawn").write_text("{}")
    with pytest.raises(Refused, match="cannot start rank 0: another waiter has already started this rank"):
        job.begin(talk)
    node.follow(talk)
    node.stop(talk)
    talk.wait_for("swept")
    assert "started" not in talk.kinds()
