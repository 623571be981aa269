"""Runs that are broken on purpose: a script whose ranks do as a file on their node says, and looks at what became of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab.locks import lock_holder
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.head_cli import Head
    from tests.lab.node import Node

SCRIPT = """\
import ctypes, os, select, signal, subprocess, sys, time
rank, attempt = os.environ["RANK"], os.environ["CLUSTERCTL_ATTEMPT"]
home = os.path.expanduser("~")
copy = os.open("%s/copy.%s.%s" % (home, attempt, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

def say(data):
    os.write(copy, data)
    os.write(1, data)

number = 0
while not os.path.exists(home + "/go"):
    say(b"rank %s line %d gr\\xc3\\xbc\\xc3\\x9fe \\xff\\n" % (rank.encode(), number))
    number += 1
    try:
        orders = open("%s/do.%s" % (home, rank)).read()
    except FileNotFoundError:
        select.select([], [], [], 0.02)  # libfaketime lets sleep() oversleep by what it shifts the clock back
    else:
        exec(orders)
say(b"no newline at the end")
"""
"""Prints, and keeps what it printed; obeys `~/do.RANK` (Python), ends well at `~/go`."""


def make(head: Head, made: Sequence[Node], workers: int = 2, job: dict[str, Any] | None = None, **more: Any) -> None:
    """Write the script and a cluster file for it."""
    (head.folder / "faulty.py").write_text(SCRIPT)
    head.write({n.name: workers for n in made}, {"script": "faulty.py", "grace": "1s", **(job or {})}, **more)


def add_spare(file: Path, spare: Node) -> None:
    """Give a cluster file that was written a spare host with one worker."""
    entry = f"- host: {spare.name}\n  role: spare\n  gpus: 0\n  workers: 1\n"
    file.write_text(file.read_text().replace("job:", f"{entry}job:"))


def start(head: Head, *arguments: str) -> str:
    """Start what the cluster file says; return the run's id."""
    return str(head.json("up", "-d", "--no-health", *arguments)["run"])


def order(node: Node, rank: int, orders: str) -> None:
    """Let a rank do something, now or whenever it is started."""
    path = node.path(f"do.{rank}")
    path.with_name(f"do.{rank}.new").write_text(orders)
    path.with_name(f"do.{rank}.new").rename(path)


def run_dir(head: Head, run: str) -> Path:
    return Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs" / run


def controller_pid(head: Head, run: str) -> int:
    """Return who writes the run directory."""
    return wait_for(lambda: lock_holder(run_dir(head, run) / "lock"), what="a controller")


def worker_pid(node: Node, rank: int, script: str = "faulty.py") -> int:
    """Return the process of a rank, by its environment."""
    found = [p for p in node.pids_of(f"{script}$") if node.environ(p).get("RANK") == str(rank)]
    return found[0]


def written(node: Node, rank: int, attempt: int = 0) -> bytes:
    """Return what a rank wrote, as the rank itself has kept it."""
    path = node.path(f"copy.{attempt}.{rank}")
    return path.read_bytes() if path.exists() else b""


def writes(node: Node, rank: int, much: int = 200, attempt: int = 0) -> None:
    """Return when a rank has written so many bytes more, seen on its node without ssh."""
    size = len(written(node, rank, attempt))
    node.wait_for(lambda: len(written(node, rank, attempt)) >= size + much, 30.0, f"{much} bytes of rank {rank}")


def nothing_left(made: Sequence[Node]) -> None:
    """Agents and supervisors take their leave a moment after the run's end."""
    try:
        wait_for(lambda: not any(n.leftovers() for n in made))
    except TimeoutError:
        left = {n.name: [p.command for p in n.leftovers()] for n in made}
        raise AssertionError(f"left: {left}") from None


def every_byte(head: Head, run: str, made: Sequence[Node], workers: int = 2, attempt: int = 0) -> None:
    """Check that the head has what each rank wrote: all that reached its file, which is all but what a kill cut off."""
    for index, node in enumerate(made):
        for rank in range(index * workers, (index + 1) * workers):
            kept = written(node, rank, attempt)
            replica = run_dir(head, run) / "nodes" / node.name / f"attempt-{attempt}" / f"rank-{rank}.log"
            shown = replica.read_bytes() if replica.exists() else b""
            assert kept.startswith(shown), f"rank {rank}: the replica is not what the rank wrote"
            assert kept[len(shown) :].count(b"\n") <= 1, f"rank {rank}: {len(shown)} bytes of {len(kept)}"
