"""Jobs that are started in both ways: each worker anew, and forked by a forkserver; and what a bare Python makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux.spawn import PYTHON_PLACEHOLDER
from clusterctl.agent.protocol.command_messages import Command
from tests.agent.talk import REPOSITORY, SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

METHODS = ("spawn", "fork")
PRELOAD = ["decimal"]


class Job:
    """One job on one node.

    Args:
        method: Of METHODS.
        argv: What each rank runs, behind the interpreter.
        env: What all ranks have in their environment.
    """

    def __init__(
        self,
        node: Node,
        method: str,
        *argv: str,
        env: dict[str, str] | None = None,
        preload: list[str] | None = PRELOAD,
        **options: Any,
    ) -> None:
        self.node, self.method, self.argv = node, method, [PYTHON_PLACEHOLDER, *argv]
        self.python = sys.executable
        self.env = {"PYTHONUNBUFFERED": "1", **(env or {})}
        self.options = options
        self.forked = {"argv": self.argv, "env": self.env, "preload": preload, "inject": False, "keep": False}
        self.work = node.home / "work"
        self.work.mkdir(exist_ok=True)

    def write(self, name: str, text: str) -> None:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def prepare(self, talk: Talk, ranks: int = 1, attempt: int = 0, **more: Any) -> None:
        wanted = {"forked": {**self.forked, **more}} if self.method == "fork" else {}
        self.node.prepare(talk, ranks, attempt, python=self.python, **self.options, **wanted)

    def begin(
        self, talk: Talk, ranks: int = 1, attempt: int = 0, *, inject: bool = False, late: dict[str, str] | None = None
    ) -> None:
        workers = [
            {"rank": n, "local_rank": n, "argv": self.argv, "env": {**self.env, "RANK": str(n), **(late or {})}}
            for n in range(ranks)
        ]
        talk.ask(Command.START, **self.node.where, attempt=attempt, workers=workers, inject=inject)

    def run(self, ranks: int = 1, *, seconds: float = SECONDS, **more: Any) -> Ran:
        talk = self.node.talk()
        self.prepare(talk, ranks)
        self.node.follow(talk)
        self.begin(talk, ranks, **more)
        talk.wait_for("swept", seconds=seconds)
        ran = Ran(talk, self.node.folder)
        assert ran.forked == (self.method == "fork"), talk.of("alarm")
        return ran

    def bare(self, **env: str) -> tuple[int, str]:
        """What Python itself says, and its exit code, as subprocess has it."""
        done = subprocess.run(
            [sys.executable, *self.argv[1:]],
            cwd=self.work,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **self.env, "RANK": "0", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=280,
        )
        return done.returncode, done.stdout.decode()


class Ran:
    """What became of it."""

    def __init__(self, talk: Talk, folder: Path) -> None:
        self.talk, self.folder = talk, folder

    @property
    def forked(self) -> bool:
        return any(alarm["code"] == "forked" for alarm in self.talk.of("alarm"))

    def said(self, rank: int = 0, attempt: int = 0) -> str:
        name = f"attempt-{attempt}/rank-{rank}.log"
        size = (self.folder / name).stat().st_size
        self.talk.until(lambda: len(self.talk.files.get(name, b"")) >= size)
        return self.talk.files.get(name, bytearray()).decode()

    def code(self, rank: int = 0) -> int:
        """The exit code as subprocess has it: negative for a signal."""
        event = self.talk.exits()[rank]
        return int(event["exit_code"]) if event["signal"] is None else -int(event["signal"])
