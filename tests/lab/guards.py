"""The processes that become nodes, seen from the lab: started, told what to be, listened to."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.lab.node import Node
    from tests.lab.setup import Setup

REPOSITORY: Final = Path(__file__).resolve().parents[2]


def spawn(node: Node, setup: Setup) -> subprocess.Popen[str]:
    """Start the guard of a node; it answers with lines."""
    argv = [sys.executable, "-E", "-S", "-s", "-B", "-m", "tests.lab.init"]
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    with node.log.open("w") as log:
        guard = subprocess.Popen(
            argv, cwd=REPOSITORY, env=env, text=True, start_new_session=True, pass_fds=node.descriptors,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    tell(guard, json.dumps(setup))
    return guard


def tell(guard: subprocess.Popen[str], line: str) -> None:
    """Write it a line."""
    assert guard.stdin is not None
    # A guard that is gone has no answer either, and that failure shows what it wrote. Written without Python's
    # buffer, which would fail once more when it is closed.
    with contextlib.suppress(BrokenPipeError):
        data = memoryview(f"{line}\n".encode())
        while data:
            data = data[os.write(guard.stdin.fileno(), data) :]


def line(node: Node, guard: subprocess.Popen[str], deadline: float) -> str:
    """Return its next line.

    Raises:
        RuntimeError: it has ended, or says nothing until the deadline; carries what it wrote.
    """
    assert guard.stdout is not None
    readable, _, _ = select.select([guard.stdout], [], [], max(0.0, deadline - time.monotonic()))
    text = guard.stdout.readline().strip() if readable else ""
    if not text:
        raise RuntimeError(f"{node.name} did not come up: {node.log.read_text() or 'no answer'}")
    return text


def close(guard: subprocess.Popen[str]) -> None:
    """Close the pipes to it."""
    for pipe in (guard.stdin, guard.stdout):
        if pipe is not None:
            pipe.close()
