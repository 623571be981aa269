"""A node that is full of processes."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.node import Node

NAME = "crowd"


def folder() -> str:
    """Where the program lies; a node has to see it (`NodeSpec.expose`)."""
    return str(compiled(Path(__file__).with_name("crowd.c"), NAME, "-static"))


@contextlib.contextmanager
def on(node: Node, count: int) -> Iterator[None]:
    """Let the node's user have so many processes more, which sleep."""
    argv = node.inside([f"{folder()}/{NAME}", str(count)], node.spec.user)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as crowd:
        assert crowd.stdout is not None
        try:
            assert crowd.stdout.readline() == "all are there\n"
            yield
        finally:
            for pid in node.pids_of(f"/{NAME} ")[:1]:
                node.signal(pid, 9)
            crowd.wait()
