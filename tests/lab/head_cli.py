"""The command line as a person on the head runs it: real processes, judged by code and streams."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from clusterctl.config.default_workdir import build_default_workdir
from tests.lab import ways

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Head:
    """A working folder on the head with a cluster file in it; `enter` is put before each command."""

    folder: Path
    env: Mapping[str, str]
    enter: Sequence[str] = ()

    def write(self, hosts: Mapping[str, int], job: Mapping[str, Any], *, gpus: Sequence[int] = (), **more: Any) -> Path:
        """Write `cluster.yaml`: host to workers, and the GPUs of each host, which need not be there to be claimed.

        The nodes are reached as `ways.chosen` says.
        """
        entries = [{"host": name, "gpus": list(gpus) or 0, "workers": count} for name, count in hosts.items()]
        document = {"version": 1, "name": "lab", "hosts": entries, "job": dict(job), **more}
        way = ways.chosen()
        if way is not None:
            document = way.into(document)
            way.accept(self.env)
        path = self.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(document, allow_unicode=True))
        return path

    def workdir(self, name: str = "lab") -> str:
        """Return where the code of this folder lies on a node, below the node's home."""
        return build_default_workdir(name, str(self.folder.resolve())).removeprefix("~/")

    def run(self, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        return subprocess.run(
            [*self.enter, sys.executable, "-m", "clusterctl", *arguments],
            cwd=self.folder,
            env=dict(self.env),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start one command and leave it running; its streams are pipes."""
        return subprocess.Popen(
            [*self.enter, sys.executable, "-m", "clusterctl", *arguments],
            cwd=self.folder,
            env=dict(self.env),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def newest(self) -> str:
        """Return the run that was begun last, whatever became of it."""
        return str(max(self.json("ps", "-a"), key=lambda entry: entry["started"] or "")["run"])

    def json(self, *arguments: str, timeout: float = 60.0) -> Any:
        """Return what a command prints as JSON."""
        done = self.run(*arguments, "--json", timeout=timeout)
        assert done.stdout, f"`{' '.join(arguments)}` printed nothing, exit code {done.returncode}: {done.stderr}"
        return json.loads(done.stdout)
