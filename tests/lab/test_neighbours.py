"""What another user of a node can do to a run there: nothing, or it is noticed, named and survived."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.head_cli import Head
from tests.lab.neighbour import Neighbour
from tests.lab.spec import NodeSpec

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.lab.lab import Lab
    from tests.lab.node import Node

JOB = """\
import os, select
home = os.path.expanduser("~")
open(home + "/ready", "w").close()
while not os.path.exists(home + "/go"):
    select.select([], [], [], 0.02)
print("trained")
"""


@dataclass(frozen=True)
class Case:
    """What the neighbour does, and what has to be seen of it.

    Attributes:
        before: His script before the start; it is his before anything of the run is there.
        during: His script while the worker runs.
        kill: Of what has these words in its command line the run loses a process then.
        named: Words of `up`; none where what he does is out of reach of the run.
        code: How `up` ends.
        users: Whose run it is.
        more: Of the cluster file.
    """

    before: str = ""
    during: str = ""
    kill: str = ""
    named: tuple[str, ...] = ()
    code: int = 0
    users: tuple[str, ...] = ("ann",)
    more: Mapping[str, Any] = field(default_factory=dict)


FORGED_TAG = """
(worker,) = processes("job.py")
limits = open(f"/proc/{worker}/limits").read()
(tag,) = (int(line.split()[3]) for line in limits.splitlines() if line.startswith("Max file locks"))
resource.setrlimit(10, (tag, resource.getrlimit(10)[1]))
stay()
"""
TAKEN_PORT = """
(port,) = held_ports()
taken = socket.socket()
taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
taken.bind(("", port))
taken.listen()
stay()
"""
NAMES_OF_SOCKETS = """
lines = open("/proc/net/unix").read().splitlines()
names = {line.split()[-1].replace("@", chr(0)) for line in lines if "clusterctl-" in line}
print("done", flush=True)
taken = []
while True:
    for name in names:
        try:
            taken.append(socket.socket(socket.AF_UNIX))
            taken[-1].bind(name)
            taken[-1].listen()
        except OSError:
            taken.pop().close()
    select.select([], [], [], 0.001)
"""
NAME_OF_PORT = """
taken = socket.socket(socket.AF_UNIX)
taken.bind(chr(0) + "clusterctl-port-29517")
stay()
"""
CASES = {
    "the name of a socket, taken once its supervisor is killed": Case(
        during=NAMES_OF_SOCKETS, kill="clusterctl-agent supervise", users=("ann", "root")
    ),
    "the name of a fixed port": Case(before=NAME_OF_PORT, more={"network": {"master_port": 29517}}),
    "the tag of a run, copied": Case(
        during=FORGED_TAG, named=("left alone: pid", "of uid 1502"), users=("ann", "root")
    ),
    "MASTER_PORT, listened on before rank 0 does": Case(
        during=TAKEN_PORT,
        named=("uid 1502 listens on port", "a port of the run is taken"),
        code=100,
        users=("ann", "root"),
    ),
}
ROWS = [pytest.param(user, case, id=f"{name}, {user}") for name, case in CASES.items() for user in case.users]


@dataclass
class Stage:
    """A node, its victim's head, and the neighbour."""

    node: Node
    head: Head
    neighbour: Neighbour

    def write(self, more: Mapping[str, Any]) -> None:
        (self.head.folder / "job.py").write_text(JOB)
        self.head.write({self.node.name: 1}, {"script": "job.py", "grace": "1s"}, **more)
        for name in ("ready", "go"):
            self.node.path(name).unlink(missing_ok=True)

    def up(self) -> subprocess.Popen[str]:
        return self.head.start("up", "--no-health")

    def started(self) -> None:
        self.node.wait_for(self.node.path("ready").exists, what="the worker")

    def left(self) -> list[str]:
        return [process.command for process in self.node.leftovers() if process.uid == self.node.spec.uid]

    def go(self) -> None:
        self.node.path("go").touch()


@pytest.fixture(scope="module")
def stages(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Stage]]:
    """One node of an ordinary user and one of root's, for all cases."""
    found = {}
    for user, node in zip(("ann", "root"), lab.add([NodeSpec(user="ann", account=1501), NodeSpec()]), strict=True):
        folder: Path = tmp_path_factory.mktemp(user)
        env = lab.head_env(XDG_STATE_HOME=str(tmp_path_factory.mktemp("state")))
        found[user] = Stage(node, Head(folder, env), Neighbour(node))
    yield found
    lab.remove([stage.node for stage in found.values()])
    lab.end_head_processes()


@pytest.mark.parametrize(("user", "case"), ROWS)
def test_what_another_user_does_is_out_of_reach_or_noticed_named_and_survived(
    stages: dict[str, Stage], user: str, case: Case
) -> None:
    stage = stages[user]
    stage.write(case.more)
    try:
        if case.before:
            stage.neighbour.do(case.before)
        up = stage.up()
        if case.during:
            stage.started()
            stage.neighbour.do(case.during)
        if case.kill:
            stage.node.signal(stage.node.pids_of(case.kill)[0], 9)
        his = stage.neighbour.pids()
        if not case.code:
            stage.go()
        said = "".join(up.communicate(timeout=60))

        assert up.returncode == case.code, said
        for words in case.named:
            assert words in said
        assert stage.neighbour.pids() == his
        stage.node.wait_for(lambda: not stage.left(), what="the run to be gone")
    finally:
        stage.neighbour.leave()
