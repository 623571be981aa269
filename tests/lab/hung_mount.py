"""A hung file system (`tests.hung_fuse`) on a node."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

from tests import hung_fuse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.node import Node

_ASKED = "/run/asked"


def asked(node: Node) -> bool:
    """Whether somebody waits for the file system at /mnt."""
    return node.path(_ASKED).exists()


@contextlib.contextmanager
def on(node: Node) -> Iterator[None]:
    """Have such a file system at /mnt of a node."""
    server = node.start(hung_fuse.argv("/mnt", _ASKED))
    node.wait_for(lambda: hung_fuse.KIND in node.path("/proc/1/mounts").read_text(), what="the mount")
    try:
        yield
    finally:
        # With its server the mount ends, and whoever waits for it is told so.
        for pid in node.pids_of("/dev/fuse"):
            node.signal(pid, signal.SIGKILL)
        server.wait()
        node.run(["umount", "-l", "/mnt"], check=True)
