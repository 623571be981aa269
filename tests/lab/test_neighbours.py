"""What another user of a node can do to a run there: nothing, or it is noticed, named and survived."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab import tricks
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
REFUSED, RANK_FAILED = 6, 100
JOB = """\
import os, select
home = os.path.expanduser("~")
open(home + "/ready", "w").close()
while not os.path.exists(home + "/go"):
    select.select([], [], [], 0.02)
print("trained")
"""


@dataclass(frozen=True)
class Run:
    """A command of the victim's, and how it has to end.

    Attributes:
        command: Which; a start unless said otherwise.
        code: Its exit code, or that of who ends it.
        more: Of the cluster file.
        gpus: What it claims.
        mate: It has a second node.
        kill: Of what has these words in its command line the run loses a process while the worker runs.
        orphan: It is ended by a head that knows nothing of it, else by the worker.
    """

    command: tuple[str, ...] = ("up", "--no-health")
    code: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    mate: bool = False
    kill: str = ""
    orphan: bool = False


@dataclass(frozen=True)
class Case:
    """What the neighbour does, and what has to be seen of it.

    Attributes:
        run: Beside what he does it; cases with the same object share one.
        before: His script before the start; it is his before anything of the run is there.
        during: His script while the worker runs.
        trace: What is there of his once he has done it; none where his script ends by itself or stays.
        named: What is said; none where what he does is out of reach of the run. `{pid}` is his process.
        users: Whose run it is.
    """

    run: Run = field(default_factory=Run)
    before: str = ""
    during: str = ""
    trace: str = ""
    named: tuple[str, ...] = ()
    users: tuple[str, ...] = ("ann",)


SECRET = {"secrets": {"TOKEN": {"env": "TOKEN"}}, "restart": {"max_restarts": 1}}
BESIDE = Run(more={**SECRET, "network": {"master_port": 29517}}, gpus=(0,))
KILLED = Run(more=SECRET, kill="clusterctl-agent supervise")
CASES = {
    "the folder in memory, made first": Case(
        BESIDE,
        before=tricks.MEMORY,
        users=("ann", "root"),
    ),
    "the folder for state and agents, made first": Case(BESIDE, before=tricks.TEMPORARY, users=("ann", "root")),
    "the name of a fixed port": Case(BESIDE, before=tricks.NAME_OF_PORT, users=("ann", "root")),
    "the temporary places, filled": Case(BESIDE, before=tricks.FULL_TEMPORARY, users=("ann", "root")),
    "the environment of a run, copied": Case(BESIDE, during=tricks.ENVIRONMENT, users=("ann", "root")),
    "the tag of a run, copied": Case(BESIDE, during=tricks.FORGED_TAG, users=("ann", "root")),
    "the folder in memory, a link elsewhere": Case(
        KILLED,
        before=tricks.MEMORY_LINK,
        users=("ann", "root"),
    ),
    "the name of a socket, taken once its supervisor is killed": Case(
        KILLED, during=tricks.NAMES_OF_SOCKETS, users=("ann", "root")
    ),
    "memory for all, filled": Case(
        Run(more=SECRET),
        before=tricks.FULL_MEMORY,
        named=("/dev/shm/clusterctl-{uid}-", ": No space left", "cannot restart it"),
    ),
    "names that steer terminals, while a head that lost its runs ends them": Case(
        Run(orphan=True), during=tricks.ESCAPES
    ),
    "idle connections to where nodes try to meet": Case(
        Run(command=("up",), mate=True, more={"network": {"master_port": 29519}}), before=tricks.IDLE, trace="/tmp/idle"
    ),
    "a GPU claim, locked": Case(
        Run(gpus=(0,), code=REFUSED),
        before=tricks.LOCKED_CLAIM,
        named=("GPU 0 is held by run ?]52;c;eA==? of uid 1502",),
        users=("ann", "root"),
    ),
    "a GPU claim, closed to others": Case(Run(gpus=(0,)), before=tricks.CLOSED_CLAIM, users=("ann", "root")),
    "a GPU claim, a hard link to a file of the victim's": Case(Run(gpus=(0,)), before=tricks.HARD_LINK),
    "a GPU claim, a link to a file of the victim's": Case(Run(gpus=(0,)), before=tricks.SYMBOLIC_LINK),
    "a fixed port, listened on before the start": Case(
        Run(more={"network": {"master_port": 29518}}, code=REFUSED),
        before=tricks.FIXED_PORT,
        named=("port 29518", "uid 1502"),
    ),
    "MASTER_PORT, listened on before rank 0 does": Case(
        Run(code=RANK_FAILED),
        during=tricks.TAKEN_PORT,
        named=("uid 1502 listens on port", "a port of the run is taken"),
        users=("ann", "root"),
    ),
}
ROWS = [pytest.param(user, name, id=f"{name}, {user}") for name, case in CASES.items() for user in case.users]


@dataclass
class Outcome:
    """What was seen of a run and of who did something beside it.

    Attributes:
        left: Processes of the victim's that do not go.
        pids: The process of each case.
        done: The cases of which there is what has to be there; their processes live, or ended well.
    """

    code: int
    said: str
    left: list[str]
    secrets: list[str]
    precious: str
    pids: dict[str, int]
    done: set[str]


@dataclass
class Stage:
    """A node, its victim's head and one that knows of no run, and a second node of the victim's."""

    node: Node
    mate: Node
    head: Head
    lost: Head
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def of(self, run: Run, user: str) -> Outcome:
        """Return what was seen, having seen to it the first time."""
        if id(run) not in self.outcomes:
            cases = {name: case for name, case in CASES.items() if case.run is run and user in case.users}
            self.outcomes[id(run)] = self.play(run, cases)
        return self.outcomes[id(run)]

    def play(self, run: Run, cases: Mapping[str, Case]) -> Outcome:
        """Let the command run, and all of the cases beside it."""
        self.write(run)
        neighbours = {name: Neighbour(self.node) for name in cases}
        command = None
        try:
            for name, case in cases.items():
                neighbours[name].do(case.before)
            command = self.head.start(*run.command)
            if any(case.during for case in cases.values()) and self.started(command):
                for name, case in cases.items():
                    neighbours[name].do(case.during)
            code, said = self.end(run, command)
            done = {name for name, case in cases.items() if neighbours[name].did(case.trace)}
            pids = {name: neighbour.pid for name, neighbour in neighbours.items()}
            return Outcome(code, said, self.left(), self.secrets(), self.precious(), pids, done)
        finally:
            for neighbour in neighbours.values():
                neighbour.leave()
            if command is not None:
                if command.poll() is None:
                    self.head.run("down", "--all", "--kill")
                    command.kill()
                command.communicate()

    def started(self, command: subprocess.Popen[str]) -> bool:
        """Wait for the worker; return whether there is one."""
        ready = self.node.path("ready")
        self.node.wait_for(lambda: ready.exists() or command.poll() is not None, what="the worker")
        return ready.exists()

    def write(self, run: Run) -> None:
        """Make what the victim has, and let the node be as one that nobody has used yet."""
        (self.head.folder / "job.py").write_text(JOB)
        hosts = [self.node.name, *([self.mate.name] if run.mate else [])]
        self.head.write(dict.fromkeys(hosts, 1), {"script": "job.py", "grace": "1s"}, gpus=run.gpus, **run.more)
        self.node.run(["sh", "-c", "rm -rf /dev/shm/* /var/tmp/*"])
        # Linux lets nobody make a hard link to what he may not write.
        script = f"umask 0; printf precious > {tricks.PRECIOUS}"
        self.node.run(["sh", "-c", script], user=self.node.spec.user, check=True)
        for node in (self.node, self.mate):
            for name in ("ready", "go"):
                node.path(name).unlink(missing_ok=True)

    def end(self, run: Run, command: subprocess.Popen[str]) -> tuple[int, str]:
        """Let a command end as it is meant to end; return its exit code and all that was said.

        Of an orphan it is the code of who ended it: that of its own command depends on which news comes first.
        """
        for pid in self.node.pids_of(run.kill)[:1] if run.kill else []:
            self.node.signal(pid, 9)
        ended = self.lost.run("down", "cluster.yaml", "--orphans") if run.orphan else None
        if run.code != RANK_FAILED:
            for node in (self.node, self.mate):
                node.path("go").touch()
        said = "".join(command.communicate(timeout=60))
        return (ended.returncode, said + ended.stdout + ended.stderr) if ended else (command.returncode, said)

    def secrets(self) -> list[str]:
        """Return the files of the node that hold the secret of its runs; what is mounted below holds programs."""
        places = ["/dev/shm", "/tmp", "/var/tmp", self.node.spec.home]
        look = ["-xdev", "-type", "f", "-exec", "grep", "-lsF", SECRET_VALUE, "{}", "+"]
        found = self.node.run(["find", *places, *look])
        return found.stdout.split()

    def left(self) -> list[str]:
        """Return what of the victim's does not go."""
        found: list[str] = []

        def gone() -> bool:
            found[:] = [process.command for process in self.node.leftovers() if process.uid == self.node.spec.uid]
            return not found

        with contextlib.suppress(TimeoutError):
            self.node.wait_for(gone)
        return found

    def precious(self) -> str:
        """Return what a file of the victim's holds to which links may lead."""
        return self.node.path(tricks.PRECIOUS).read_text()


@pytest.fixture(scope="module")
def stages(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Stage]]:
    """One node of an ordinary user and one of root's, for all cases, and a second one of each."""
    places = {place: Place(size="2m") for place in ("/dev/shm", "/tmp", "/var/tmp")}
    specs = [NodeSpec(user="ann", account=1501, places=places), NodeSpec(places=places)]
    made = lab.add([*specs, *specs])
    found = {}
    for user, node, mate in zip(("ann", "root"), made[:2], made[2:], strict=True):
        folder: Path = tmp_path_factory.mktemp(user)
        envs = [
            lab.head_env(XDG_STATE_HOME=str(tmp_path_factory.mktemp("state")), TOKEN=SECRET_VALUE) for _ in range(2)
        ]
        found[user] = Stage(node, mate, Head(folder, envs[0]), Head(folder, envs[1]))
    yield found
    lab.remove(made)
    lab.end_head_processes()


@pytest.mark.parametrize(("user", "name"), ROWS)
def test_what_another_user_does_is_out_of_reach_or_noticed_named_and_survived(
    stages: dict[str, Stage], user: str, name: str
) -> None:
    case = CASES[name]

    seen = stages[user].of(case.run, user)

    assert seen.precious == "precious"
    assert seen.code == case.run.code, seen.said
    for words in case.named:
        assert words.format(uid=stages[user].node.spec.uid, pid=seen.pids[name]) in seen.said
    assert "\x1b" not in seen.said
    assert name in seen.done
    assert (seen.left, seen.secrets) == ([], [])
