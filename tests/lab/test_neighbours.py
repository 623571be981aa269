"""What another user of a node can do to a run there: nothing, or it is noticed, named and survived."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.head_cli import Head
from tests.lab.neighbour import Neighbour
from tests.lab.places import Place
from tests.lab.spec import NodeSpec

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.lab.lab import Lab
    from tests.lab.node import Node

SECRET_VALUE = "hf_5ecr37"
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
        gpus: What it claims.
    """

    before: str = ""
    during: str = ""
    kill: str = ""
    named: tuple[str, ...] = ()
    code: int = 0
    users: tuple[str, ...] = ("ann",)
    more: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()


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
MEMORY = """
os.mkdir(f"/dev/shm/clusterctl-{VICTIM}", 0o777)
print("done")
"""
MEMORY_LINK = """
os.symlink("/tmp", f"/dev/shm/clusterctl-{VICTIM}")
print("done")
"""
TEMPORARY = """
os.mkdir(f"/var/tmp/clusterctl-{VICTIM}", 0o777)
print("done")
"""
FULL_MEMORY = """
with open("/dev/shm/full", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(65536))
    except OSError:
        pass
print("done")
"""
CLAIMS = """
os.mkdir("/var/tmp/clusterctl-locks", 0o700)
print("done")
"""
ENVIRONMENT = """
(worker,) = processes("job.py")
(name,) = {name for name in os.environ if name == "PATH"}
os.execve("/usr/bin/env", ["env", "sh", "-c", "echo done; exec sleep 1000"], {
    "PATH": os.environ[name], "CLUSTERCTL_NODE": socket.gethostname(), "CLUSTERCTL_RUN_ID": "lab"
})
"""
ESCAPES = FORGED_TAG.replace("stay()", r"open('/proc/self/comm', 'w').write('\x1b]52;c;eA==\x07')" + "\nstay()")
FIXED_PORT = """
taken = socket.socket()
taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
taken.bind(("", 29518))
taken.listen()
stay()
"""
SECRET = {"secrets": {"TOKEN": {"env": "TOKEN"}}, "restart": {"max_restarts": 1}}
CASES = {
    "the folder in memory, made first": Case(
        before=MEMORY,
        more=SECRET,
        named=("/dev/shm/clusterctl-{uid} belongs to uid 1502: ", "is used instead"),
        users=("ann", "root"),
    ),
    "the folder in memory, a link elsewhere": Case(
        before=MEMORY_LINK, more=SECRET, named=("/dev/shm/clusterctl-{uid} is not a folder: ", "is used instead")
    ),
    "memory for all, filled": Case(before=FULL_MEMORY, more={"secrets": SECRET["secrets"]}),
    "the folder for state and agents, made first": Case(before=TEMPORARY, users=("ann", "root")),
    "the folder of GPU claims, made first": Case(
        before=CLAIMS,
        gpus=(0,),
        named=("/var/tmp/clusterctl-locks belongs to uid 1502", "install -d -m 1777"),
        code=6,
        users=("ann", "root"),
    ),
    "the environment of a run, copied": Case(during=ENVIRONMENT, users=("ann", "root")),
    "the tag of a run, copied by a process whose name steers terminals": Case(
        during=ESCAPES, named=("left alone: pid", "of uid 1502")
    ),
    "a fixed port, listened on before the start": Case(
        before=FIXED_PORT, more={"network": {"master_port": 29518}}, named=("port 29518", "uid 1502"), code=6
    ),
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

    def write(self, case: Case) -> None:
        (self.head.folder / "job.py").write_text(JOB)
        self.head.write({self.node.name: 1}, {"script": "job.py", "grace": "1s"}, gpus=case.gpus, **case.more)
        # As on a machine where nobody has used it yet.
        self.node.run(["sh", "-c", "rm -rf /dev/shm/* /var/tmp/clusterctl-*"])
        for name in ("ready", "go"):
            self.node.path(name).unlink(missing_ok=True)

    def up(self) -> subprocess.Popen[str]:
        return self.head.start("up", "--no-health")

    def started(self, up: subprocess.Popen[str]) -> None:
        self.node.wait_for(lambda: self.node.path("ready").exists() or up.poll() is not None, what="the worker")

    def secrets(self) -> list[str]:
        """Return the files of the node that hold the secret of its runs."""
        found = self.node.run(["grep", "-rlsF", SECRET_VALUE, "/dev/shm", "/tmp", "/var/tmp", self.node.spec.home])
        return found.stdout.split()

    def left(self) -> list[str]:
        return [process.command for process in self.node.leftovers() if process.uid == self.node.spec.uid]

    def go(self) -> None:
        self.node.path("go").touch()


@pytest.fixture(scope="module")
def stages(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Stage]]:
    """One node of an ordinary user and one of root's, for all cases."""
    places = {"/dev/shm": Place(size="2m")}
    specs = [NodeSpec(user="ann", account=1501, places=places), NodeSpec(places=places)]
    found = {}
    for user, node in zip(("ann", "root"), lab.add(specs), strict=True):
        folder: Path = tmp_path_factory.mktemp(user)
        env = lab.head_env(XDG_STATE_HOME=str(tmp_path_factory.mktemp("state")), TOKEN=SECRET_VALUE)
        found[user] = Stage(node, Head(folder, env), Neighbour(node))
    yield found
    lab.remove([stage.node for stage in found.values()])
    lab.end_head_processes()


@pytest.mark.parametrize(("user", "case"), ROWS)
def test_what_another_user_does_is_out_of_reach_or_noticed_named_and_survived(
    stages: dict[str, Stage], user: str, case: Case
) -> None:
    stage = stages[user]
    stage.write(case)
    up = None
    try:
        if case.before:
            stage.neighbour.do(case.before)
        up = stage.up()
        if case.during:
            stage.started(up)
            stage.neighbour.do(case.during)
        if case.kill:
            stage.node.signal(stage.node.pids_of(case.kill)[0], 9)
        if not case.code:
            stage.go()
        said = "".join(up.communicate(timeout=60))

        assert up.returncode == case.code, said
        for words in case.named:
            assert words.format(uid=stage.node.spec.uid) in said
        assert "\x1b" not in said
        assert not stage.neighbour.harmed()
        stage.node.wait_for(lambda: not stage.left(), what="the run to be gone")
        assert stage.secrets() == []
    finally:
        stage.neighbour.leave()
        if up is not None and up.poll() is None:
            stage.head.run("down", "--all", "--kill")
            up.kill()
