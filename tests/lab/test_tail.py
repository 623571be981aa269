"""A view of a run shows the end of its output at once, however much of it is still on its way."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.faulty import controller_pid
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

LINES = 2_000_000
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
    """Let no more than 5 MB a second leave a node."""
    limit = ["rate", "40mbit", "burst", "256k", "latency", "50ms"]
    node.run(["tc", "qdisc", "add", "dev", node.interface, "root", "tbf", *limit], check=True)


def fast(node: Node) -> None:
    """Undo `slow`."""
    node.run(["tc", "qdisc", "del", "dev", node.interface, "root"], check=True)


def replica(head: Head, run: str, node: Node) -> Path:
    runs = Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs"
    return runs / run / "nodes" / node.name / "attempt-0" / "rank-0.log"


def test_the_tail_of_what_is_not_replicated_yet_is_shown_and_the_rest_follows_once(
    nodes: NodeFactory, head: Head
) -> None:
    (made,) = nodes(1)
    slow(made)
    (head.folder / "many.py").write_text(MANY)
    head.write({made.name: 1}, {"script": "many.py", "grace": "1s"})
    run = str(head.json("up", "-d", "--no-health")["run"])
    made.wait_for(lambda: made.path("/tmp/written").exists(), deadline=30, what="its output")
    size = LINES * 100

    views = [View(head, "attach", run), View(head, "logs", "-f", "-n", "20", "-o", "raw", run)]
    for view in views:
        view.until(LINES - 1, 15.0)
    assert replica(head, run, made).stat().st_size < size / 2
    fast(made)
    made.path("/tmp/go").touch()
    for view in views:
        view.until(LINES + 99, 60.0)
        assert view.numbers() == list(range(LINES - 20, LINES + 100))
        view.close()

    slow(made)
    os.kill(controller_pid(head, run), signal.SIGKILL)
    wait_for(lambda: not head.json("status", run)["attended"], what="the controller to be gone")
    replica(head, run, made).unlink()
    adopting = View(head, "attach", "--adopt", run)
    adopting.until(LINES + 99, 20.0)
    assert not replica(head, run, made).exists() or replica(head, run, made).stat().st_size < size / 2
    assert adopting.numbers() == list(range(LINES + 80, LINES + 100))
    adopting.close()
    fast(made)
    made.path("/tmp/stop").touch()
    assert head.run("wait", run).returncode == 0
    whole = made.path(f".local/state/clusterctl/nodes/{run}/{made.name}/attempt-0/rank-0.log")
    assert replica(head, run, made).stat().st_size == whole.stat().st_size
