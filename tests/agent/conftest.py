from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.processes import run_processes
from clusterctl.agent.protocol.command_messages import Command
from tests.agent.talk import Refused, Talk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BIN = Path(__file__).parent / "bin"


class Node:
    """A node with its own state root, and one run on it. `options` are those of each talk."""

    def __init__(self, home: Path, **options: Any) -> None:
        self.home, self.options = home, options
        self.run = f"run-{uuid.uuid4().hex[:10]}"
        self.node = "node.0"
        self.talks: list[Talk] = []

    def talk(self, **options: Any) -> Talk:
        talk = Talk(self.home / "state", **{**self.options, **options})
        self.talks.append(talk)
        return talk

    @property
    def where(self) -> dict[str, str]:
        return {"run": self.run, "node": self.node}

    @property
    def folder(self) -> Path:
        return self.home / "state/clusterctl/nodes" / self.run / self.node

    def prepare(self, talk: Talk, ranks: int = 1, attempt: int = 0, **more: Any) -> dict[str, Any]:
        arguments = {
            "workdir": str(self.home / "work"),
            "grace": 1.0,
            "health_seconds": 0.0,
            "reserve": 1 << 20,
            **more,
        }
        return talk.ask(Command.PREPARE, **self.where, attempt=attempt, ranks=list(range(ranks)), **arguments)

    def follow(self, talk: Talk, seq: int = 0, **more: Any) -> None:
        talk.ask(Command.FOLLOW, **self.where, seq=seq, **more)

    def start(
        self, talk: Talk, *argvs: list[str], attempt: int = 0, env: dict[str, str] | None = None, **more: Any
    ) -> None:
        workers = [
            {"rank": rank, "local_rank": rank, "argv": argv, "env": env or {}, **more}
            for rank, argv in enumerate(argvs)
        ]
        talk.ask(Command.START, **self.where, attempt=attempt, workers=workers, inject=False)

    def launch(self, *argvs: list[str], talk: Talk | None = None, **more: Any) -> Talk:
        """Prepare, follow and start."""
        talk = talk or self.talk()
        options = {key: more.pop(key) for key in ("env", "prologue") if key in more}
        self.prepare(talk, len(argvs), **more)
        self.follow(talk)
        self.start(talk, *argvs, **options)
        return talk

    def stop(self, talk: Talk, grace: float = 1.0, reason: str = "cancelled") -> None:
        talk.ask(Command.STOP, **self.where, grace=grace, reason=reason)

    def _guardian(self) -> proc.ProcessIdentity | None:
        return run_processes.find_supervisor(RunDir(str(self.home / "state/clusterctl"), self.run, self.node))

    def supervised(self) -> bool:
        return self._guardian() is not None

    def supervisor(self) -> int:
        """The pid of the supervisor."""
        found = self._guardian()
        assert found is not None, "no supervisor"
        return found.pid

    def waiter(self, rank: int = 0, attempt: int = 0) -> int:
        import json

        return int(json.loads((self.folder / f"attempt-{attempt}/rank-{rank}.spawn").read_text())["waiter_pid"])

    def end(self) -> None:
        for talk in self.talks:
            talk.kill()
        if not self.folder.exists():
            return
        with contextlib.suppress(Refused, AssertionError), Talk(self.home / "state", epoch=1000) as talk:
            if talk.ask(Command.STATUS, **self.where)["attempt"] >= 0:
                self.stop(talk, grace=0.0)
                self.follow(talk)
                talk.wait_for("swept")
            talk.ask(Command.FINISH, **self.where, state="cancelled", exit_code=103)
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(self.supervisor(), signal.SIGKILL)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.end()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[], Node]]:
    made: list[Node] = []

    def make() -> Node:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Node(folder))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Node]:
    """A node whose state lies on a filesystem of 16 MiB."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    home = tmp_path / "small"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", home], check=True)
    node = Node(home)
    yield node
    node.end()
    subprocess.run(["umount", "-l", home], check=True)


def gone(pid: int) -> bool:
    found = proc.read_stat(pid)
    return found is None or found.is_gone
