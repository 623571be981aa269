"""A view of a run shows the end of its output at once, however much of it is still on its way."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.head_cli import Head

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

LINES = 3_000_000
MANY = """\
import os, time
block = 10_000
for start in range(0, LINES, block):
    data = b"".join(b"line %094d\\n" % i for i in range(start, start + block))
    while data:
        data = data[os.write(1, data):]
open("/tmp/written", "w").close()
while not os.path.exists("/tmp/go"):
    time.sleep(0.05)
for i in range(LINES, LINES + 100):
    print(f"line {i}", flush=True)
while not os.path.exists("/tmp/stop"):
    time.sleep(0.05)
""".replace("LINES", str(LINES))


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


class View:
    """A command that follows a run; `numbers` are those of the lines that it has shown."""

    def __init__(self, head: Head, *arguments: str) -> None:
        argv = [sys.executable, "-m", "clusterctl", *arguments]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            argv, cwd=head.folder, env=dict(head.env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=False
        )
        self._text = b""

    def until(self, number: int, deadline: float) -> float:
        """Read until that line is shown; return how many seconds after the command was started."""
        assert self.process.stdout is not None
        while number not in self.numbers():
            left = self.began + deadline - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, left))
            data = os.read(self.process.stdout.fileno(), 1 << 20) if ready else b""
            assert data, f"line {number} was not shown within {deadline} s; shown was {self.numbers()[-3:]}"
            self._text += data
        return time.monotonic() - self.began

    def numbers(self) -> list[int]:
        return [int(found) for found in re.findall(rb"line (\d+)\n", self._text)]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def slow(node: Node) -> None:
    """Let no more than 25 MB a second leave a node."""
    limit = ["rate", "200mbit", "burst", "256k", "latency", "50ms"]
    node.run(["tc", "qdisc", "add", "dev", node.interface, "root", "tbf", *limit], check=True)


def replicated(head: Head, run: str, node: Node) -> int:
    runs = Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs"
    return (runs / run / "nodes" / node.name / "attempt-0" / "rank-0.log").stat().st_size


def test_the_tail_of_what_is_not_replicated_yet_is_shown_and_the_rest_follows_once(
    nodes: NodeFactory, head: Head
) -> None:
    (made,) = nodes(1)
    slow(made)
    (head.folder / "many.py").write_text(MANY)
    head.write({made.name: 1}, {"script": "many.py", "grace": "1s"})
    run = str(head.json("up", "-d", "--no-health")["run"])
    made.wait_for(lambda: made.path("/tmp/written").exists(), deadline=30, what="its output")

    attached = View(head, "attach", run)
    followed = View(head, "logs", "-f", "-n", "20", "-o", "raw", run)
    try:
        for view in (attached, followed):
            view.until(LINES - 1, 10.0)
        assert replicated(head, run, made) < LINES * 100 / 2
        made.path("/tmp/go").touch()
        for view in (attached, followed):
            view.until(LINES + 99, 60.0)
            assert view.numbers() == list(range(LINES - 20, LINES + 100))
    finally:
        attached.close()
        followed.close()
        made.path("/tmp/stop").touch()
    assert head.run("wait", run).returncode == 0
    assert (
        replicated(head, run, made)
        == made.path(f".local/state/clusterctl/nodes/{run}/{made.name}/attempt-0/rank-0.log").stat().st_size
    )
