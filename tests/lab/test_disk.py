"""Full disks and floods: no worker is harmed, no byte is lost unsaid."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.faulty import controller_pid
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

LINE = 64
COUNT = """\
import os, pathlib, time
number = 0
def write(count):
    global number
    for _ in range(count // 256):
        os.write(1, b"".join(b"%063d\\n" % (number + i) for i in range(256)))
        number += 256
while not os.path.exists("/tmp/stop"):
    target = pathlib.Path("/tmp/want")
    if target.exists() and int(target.read_text() or 0) > number:
        write(2048)
        pathlib.Path("/tmp/have").write_text(str(number))
    time.sleep(0.01)
"""
FLOOD = """\
import hashlib, os, pathlib
digest = hashlib.sha256()
def write(data):
    digest.update(data)
    while data:
        data = data[os.write(1, data):]
write(b"first line\\n" + bytes(range(256)) * 16 + b"\\n\\xff\\xfe broken \\xc3( text\\n" + b"a\\0b\\0\\0\\n" + b"bar\\r" * 1000)
block = b"".join(b"%099d\\n" % i for i in range(10000))
for _ in range(20):
    write(block)
for _ in range(2):
    write(b"x" * 10_000_000 + b"\\n")
for _ in range(10):
    write(block)
write(b"no newline at the end")
pathlib.Path("/tmp/digest").write_text(digest.hexdigest())
"""


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


@pytest.fixture
def small_disk(head: Head) -> Iterator[Path]:
    """The head's state on a disk of its own, of 24 MiB."""
    place = Path(head.env["XDG_STATE_HOME"])
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def start(head: Head) -> str:
    return str(head.json("up", "-d", "--no-health")["run"])


def replica(head: Head, run: str, node: Node, rank: int = 0) -> Path:
    runs = Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs"
    return runs / run / "nodes" / node.name / "attempt-0" / f"rank-{rank}.log"


def journal(head: Head, run: str, node: Node) -> list[dict[str, Any]]:
    path = replica(head, run, node).parent.parent / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def on_node(node: Node, run: str, rank: int = 0) -> Path:
    return node.path(f".local/state/clusterctl/nodes/{run}/{node.name}/attempt-0/rank-{rank}.log")


def writes(node: Node, lines: int) -> None:
    """Let the worker of COUNT write that many lines in all."""
    node.path("/tmp/want").write_text(str(lines))
    have = node.path("/tmp/have")
    node.wait_for(lambda: have.exists() and int(have.read_text() or 0) >= lines, deadline=30, what=f"{lines} lines")


def arrives(head: Head, run: str, node: Node, lines: int) -> None:
    wait_for(lambda: replica(head, run, node).stat().st_size >= lines * LINE, 60, f"{lines} lines on the head")


def dropped(head: Head, run: str, node: Node) -> list[dict[str, Any]]:
    return [event for event in journal(head, run, node) if event["kind"] == "dropped"]


def test_on_a_full_node_replicated_output_gives_way_first_and_what_is_lost_is_counted(
    nodes: NodeFactory, head: Head
) -> None:
    (made,) = nodes(1, disk="128m")
    (head.folder / "count.py").write_text(COUNT)
    head.write({made.name: 1}, {"script": "count.py", "grace": "1s"}, logs={"reserve": "16MiB"})
    run = start(head)

    writes(made, 300_000)
    arrives(head, run, made, 300_000)
    made.fill_disk(leave=65536)
    for lines in range(320_000, 520_000, 20_000):
        writes(made, lines)
        arrives(head, run, made, lines)
    said_while_connected = dropped(head, run, made)
    made.cut()
    writes(made, 1_200_000)
    made.restore()
    arrives(head, run, made, 1_200_000)
    made.path("/tmp/stop").touch()
    ended = head.run("wait", run)

    assert ended.returncode == 0, head.run("status", run).stdout
    assert sum(event["lost"] for event in said_while_connected) == 0
    said = dropped(head, run, made)
    lost, first_valid = sum(event["lost"] for event in said), max(event["first_valid"] for event in said)
    assert lost > 0
    data = replica(head, run, made).read_bytes()
    wrong = {i for i in range(len(data) // LINE) if data[i * LINE : (i + 1) * LINE] != b"%063d\n" % i}
    assert wrong, "something was lost"
    assert max(wrong) * LINE < first_valid
    assert len(wrong) * LINE <= lost + 2 * LINE
    assert data[first_valid:] == on_node(made, run).read_bytes()[first_valid:]


def test_a_flood_of_anything_arrives_byte_for_byte_within_the_limit_of_its_node(nodes: NodeFactory, head: Head) -> None:
    (made,) = nodes(1)
    (head.folder / "flood.py").write_text(FLOOD)
    head.write({made.name: 1}, {"script": "flood.py"}, logs={"reserve": "4MiB", "max_size": "16MiB"})

    run = start(head)
    ended = head.run("wait", run)

    assert ended.returncode == 0, head.run("status", run).stdout
    digest = hashlib.sha256(replica(head, run, made).read_bytes()).hexdigest()
    assert digest == made.path("/tmp/digest").read_text()
    assert sum(event["lost"] for event in dropped(head, run, made)) == 0
    assert on_node(made, run).stat().st_blocks * 512 < 32 * 1024**2


def test_a_full_head_pauses_replication_and_goes_on_when_there_is_space(
    nodes: NodeFactory, head: Head, small_disk: Path
) -> None:
    (made,) = nodes(1)
    (head.folder / "count.py").write_text(COUNT)
    head.write({made.name: 1}, {"script": "count.py", "grace": "1s"})
    run = start(head)
    events = small_disk / "clusterctl" / "runs" / run / "events.jsonl"

    def said(times: int) -> bool:
        return events.read_text().count("the head's disk is full") >= times

    writes(made, 600_000)
    wait_for(lambda: said(1), what="the controller to say that the disk is full")
    os.kill(controller_pid(head, run), signal.SIGKILL)
    wait_for(lambda: not head.json("status", run)["attended"], what="the controller to be gone")
    adopting = subprocess.Popen(
        [sys.executable, "-m", "clusterctl", "attach", "--adopt", run],
        cwd=head.folder, env=dict(head.env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for(lambda: said(2), 30, what="the next controller to say so too")
    writes(made, 700_000)
    made.path("/tmp/stop").touch()
    made.wait_for(lambda: not made.pids_of("count.py"), what="its worker to end well")
    wait_for(lambda: head.json("status", run)["workers"][0]["exit_code"] == 0, what="its end to be known")
    assert head.json("status", run)["state"] == "running"
    subprocess.run(["mount", "-o", "remount,size=256m", str(small_disk)], check=True)

    assert adopting.wait(60) == 0
    assert "replication continues" in events.read_text()
    data = replica(head, run, made).read_bytes()
    assert data == on_node(made, run).read_bytes()
    assert data.startswith(b"%063d\n" % 0)


def test_a_head_without_space_refuses_to_start(nodes: NodeFactory, head: Head, small_disk: Path) -> None:
    (made,) = nodes(1)
    head.write({made.name: 1}, {"command": ["sleep", "600"]})
    space = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (space.f_bavail * space.f_frsize))

    refused = head.run("up", "--no-health")

    assert refused.returncode == 6, refused.stderr
    assert "No space left" in refused.stderr
    assert not made.pids_of("sleep 600")
