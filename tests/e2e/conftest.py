"""A head with local nodes: real controllers, agents and workers, without ssh and without a lab."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from clusterctl.run.record.state_reader import read_summary
from tests.e2e.terminal import Terminal
from tests.lab.head_cli import Head

if TYPE_CHECKING:
    from collections.abc import Mapping

MakeHead = Callable[..., "LocalHead"]


@dataclass(frozen=True)
class LocalHead(Head):
    """A head whose cluster file names this machine, once for each node."""

    def write_local(self, job: Mapping[str, Any], workers: tuple[int, ...] = (1,), **more: Any) -> Path:
        """Write `cluster.yaml`: so many workers on each local node."""
        hosts = [{"host": "localhost", "transport": "local", "gpus": 0, "workers": count} for count in workers]
        document = {"version": 1, "name": "local", "hosts": hosts, "job": dict(job), **more}
        path = self.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    def terminal(self, *arguments: str, **options: Any) -> Terminal:
        """Run a command on a terminal of its own."""
        return Terminal(*arguments, folder=self.folder, env=self.env, **options)

    def start(self) -> str:
        """Start a detached run; return its id."""
        return str(self.json("up", "-d", "--no-health")["run"])

    def has_run_to_end(self) -> bool:
        """Whether `down --all` may find anything to do."""
        runs = Path(self.env["XDG_STATE_HOME"], "clusterctl/runs").glob("*/")
        known = [read_summary(run / "summary.json", run / "events.jsonl") for run in runs]
        return any(summary is None or summary.state.remaining for summary in known)


@pytest.fixture(scope="module")
def make_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeHead]:
    """Makes heads, each with a state of its own; every run of theirs is ended afterwards."""
    made: list[LocalHead] = []

    def make() -> LocalHead:
        folder = tmp_path_factory.mktemp("head")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "SSH_"))}
        (folder / "project").mkdir()
        head = LocalHead(folder / "project", env | {"XDG_STATE_HOME": str(folder / "state")})
        made.append(head)
        return head

    yield make
    for head in made:
        if head.has_run_to_end():
            head.run("down", "--all", "--kill")


@pytest.fixture
def head(make_head: MakeHead) -> LocalHead:
    return make_head()
