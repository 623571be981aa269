"""The waiter of a worker: whose rank it starts, what it writes down, and what it says where it cannot."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.protocol.command_messages import Command
from tests.agent.conftest import gone
from tests.agent.talk import REPOSITORY, Refused
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.agent.conftest import Node

START = """
import os, signal, sys, time
from clusterctl.agent.linux import spawn
from clusterctl.agent.supervisor import waiter
from clusterctl.agent.linux.spawn import Program
folder, *argv = sys.argv[1:]
post = waiter.WaiterConfig(
    program=Program([word.encode() for word in argv], dict(os.environb), folder.encode()),
    output_fd=os.open(folder + "/log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC),
    spawn_file=folder + "/rank-0.spawn",
    exit_file=folder + "/rank-0.exit",
)
us = os.getpid()
if "STOPPED" in os.environ:  # the waiter stands still from its first moment on
    os.register_at_fork(after_in_child=lambda: os.getppid() == us and os.kill(os.getpid(), signal.SIGSTOP))
pid, report = waiter.fork_waiter(post)
"""


ENV = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def command(folder: Path, then: str, *argv: str) -> list[str]:
    """A program that starts a waiter and then does something else."""
    return [sys.executable, "-c", START + textwrap.dedent(then), str(folder), *argv]


def start(folder: Path, then: str, *argv: str) -> str:
    """What such a program says."""
    said = subprocess.run(command(folder, then, *argv), env=ENV, check=True, stdout=subprocess.PIPE, timeout=30)
    return said.stdout.decode()


SAY = "print(os.read(report, 4096).decode()); os.waitpid(pid, 0)"


def test_a_waiter_of_a_rank_that_another_one_has_says_so_and_nothing_of_its_end(tmp_path: Path) -> None:
    (tmp_path / "rank-0.spawn").write_text("{}")
    assert json.loads(start(tmp_path, SAY, "touch", "ran")) == {
        "refused": "another waiter has already started this rank"
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "rank-0.spawn"]


def test_a_waiter_whose_supervisor_is_gone_starts_nothing_and_says_nothing(tmp_path: Path) -> None:
    program = """
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        os.dup2(os.open(folder + "/pid", os.O_WRONLY | os.O_CREAT), 1)
        print(pid, flush=True)
        os._exit(0)
    """
    stopped = {**ENV, "STOPPED": "1"}
    left = subprocess.Popen(command(tmp_path, program, "touch", "ran"), env=stopped, stdout=subprocess.DEVNULL)
    left.wait()
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: gone(pid), what="the end of the waiter")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "pid"]


def test_an_exit_is_known_although_somebody_tidied_the_files_of_the_run(tmp_path: Path) -> None:
    program = """
        os.read(report, 4096)
        for name in os.listdir(folder):
            os.unlink(folder + "/" + name)
        os.mkfifo(folder + "/gate")
        open(folder + "/gate", "w").close()
        os.waitpid(pid, 0)
    """
    start(tmp_path, program, "sh", "-c", "while ! [ -p gate ]; do sleep 0.01; done; read x < gate; exit 7")
    assert json.loads((tmp_path / "rank-0.exit").read_text())["exit_code"] == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate", "rank-0.exit"]


def test_a_supervisor_that_dies_amid_a_start_costs_no_rank(node: Node) -> None:
    gate, runs = node.home / "gate", node.home / "runs"
    script = f"echo $CLUSTERCTL_RANK >> {runs}; while [ ! -e {gate} ]; do sleep 0.05; done; exit 5"
    argvs = [["/bin/sh", "-c", script.replace("$CLUSTERCTL_RANK", str(rank))] for rank in range(16)]
    talk = node.talk()
    node.prepare(talk, len(argvs))
    node.follow(talk)
    workers = [{"rank": r, "local_rank": r, "argv": argv, "env": {}} for r, argv in enumerate(argvs)]
    asked = talk.post(Command.START, **node.where, attempt=0, workers=workers, inject=False)
    talk.eventually((node.folder / "attempt-0/rank-3.spawn").exists)
    os.kill(node.supervisor(), signal.SIGKILL)
    talk.answer(asked)
    talk.wait_for("started", len(argvs))
    talk.eventually(lambda: len(runs.read_text().split()) == len(argvs))
    gate.touch()
    talk.wait_for("swept")
    assert Counter(runs.read_text().split()) == Counter(map(str, range(len(argvs))))
    assert {end["exit_code"] for end in talk.exits().values() if not end["stopped"]} == {5}


def test_why_a_waiter_could_not_start_its_worker_is_told(node: Node) -> None:
    talk = node.talk()
    node.prepare(talk)
    supervisor = node.supervisor()
    # The least of many looks: a helper of the supervisor holds pipes of it for a moment.
    highest = min(max(int(fd.name) for fd in Path(f"/proc/{supervisor}/fd").iterdir()) for _ in range(200))
    # Enough for the supervisor, which needs a pipe; the waiter needs a file and a pipe more.
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (highest + 3, highest + 3))
    with pytest.raises(Refused, match="cannot start rank 0: Too many open files"):
        node.start(talk, ["sleep", "1000"])


def test_a_waiter_for_which_a_rank_waits_loads_little() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import clusterctl.agent.supervisor.waiter\n"
    program += "print({'dataclasses', 'inspect', 'shutil', 'socket', 'tempfile', 'hashlib'} & set(sys.modules))"
    argv = [sys.executable, "-I", "-S", "-c", program, str(REPOSITORY)]
    assert subprocess.run(argv, check=True, capture_output=True, text=True).stdout == "set()\n"
