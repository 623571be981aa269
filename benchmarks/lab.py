"""Lab nodes to measure on, and a head to type on; the tests' lab, with a folder for the job.

with lab(4) as bench:
    bench.head.write({name: 2 for name in bench.names}, {"script": "train.py"})
    bench.head.run("up")
"""

from __future__ import annotations

import compileall
import contextlib
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.head_cli import Head
from tests.lab.lab import Lab
from tests.lab.places import HOME, Place
from tests.lab.spec import NodeSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.lab.node import Node


@dataclass(frozen=True)
class BenchLab:
    """A lab that is up.

    Attributes:
        lab: The lab itself.
        nodes: Its nodes, in the order of their names.
        head: Types commands of clusterctl in a folder with a cluster file.
        env: The head's environment, for peers.
    """

    lab: Lab
    nodes: Sequence[Node]
    head: Head
    env: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """What `ssh` calls the nodes."""
        return [node.name for node in self.nodes]

    @property
    def folded(self) -> str:
        """All nodes in one word, as clush and pdsh take them too."""
        return f"n[1-{len(self.nodes)}]" if len(self.nodes) > 1 else "n1"

    def write_hosts(self) -> None:
        """Write a cluster file that only names the nodes."""
        (self.head.folder / "cluster.yaml").write_text(f"version: 1\nname: bench\nhosts: {self.folded}\n")

    def start(self, argv: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a peer's program on the head."""
        silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(list(argv), env=dict(self.env), **{**silent, **options})  # type: ignore[call-overload, no-any-return]

    def ssh_loop(self, commands: Sequence[tuple[str, str]]) -> subprocess.Popen[bytes]:
        """Start `ssh NODE COMMAND` for each pair, from one shell: starting them here would take longer."""
        lines = "".join(f"{shlex.join(['ssh', node, command])} &\n" for node, command in commands)
        return self.start(["sh", "-c", f"{lines}wait"])

    def run(self, argv: Sequence[str]) -> None:
        """Run a peer's program on the head to its end.

        Raises:
            CalledProcessError: It failed: what it took says nothing then.
        """
        subprocess.run(list(argv), env=dict(self.env), stdin=subprocess.DEVNULL, capture_output=True, check=True)

    def ours(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of clusterctl to its end, which must be a good one."""
        done = self.head.run(*arguments, timeout=300.0)
        if done.returncode != 0:
            raise RuntimeError(f"clusterctl {' '.join(arguments)}: exit code {done.returncode}: {done.stderr}")
        return done


@contextlib.contextmanager
def lab(count: int, spec: NodeSpec | None = None) -> Iterator[BenchLab]:
    """Start a lab of `count` nodes, plain ones unless `spec` says more; this process is its head while it is up.

    Their homes lie on this machine's disk, where those of real nodes lie: on a tmpfs, what is reserved for output is
    memory that the kernel clears first.

    Raises:
        RuntimeError: No lab can run here.
    """
    if reason := Lab.unavailable():
        raise RuntimeError(reason)
    # As `pip install` does, whatever the environment says of bytecode: peers are installed, too.
    compileall.compile_dir(_repository() / "clusterctl", quiet=1)
    with Lab() as made:
        nodes = made.add([_on_disk(spec or NodeSpec(), n) for n in range(count)])
        folder = made.root / "bench"
        folder.mkdir()
        env = made.head_env(PATH=f"{Path(sys.executable).parent}:{_path()}", PYTHONPATH=str(_repository()))
        yield BenchLab(lab=made, nodes=nodes, head=Head(folder, env), env=env)


def _on_disk(spec: NodeSpec, number: int) -> NodeSpec:
    return replace(spec, places={HOME: Place(shared=f"disk{number}"), **spec.places})


def _path() -> str:
    import os

    return os.environ.get("PATH", os.defpath)


def _repository() -> Path:
    return Path(__file__).resolve().parents[1]
