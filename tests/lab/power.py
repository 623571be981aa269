"""What a machine that loses its power keeps: its disks."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from tests.lab import kernel

if TYPE_CHECKING:
    from tests.lab.node import Node


def take_disks(node: Node) -> dict[str, int]:
    """Return descriptors of the mounts that the node keeps without power, by the names of their places."""
    taken: dict[str, int] = {}
    # Only a thread of its own can look from another namespace and be gone afterwards; descriptors are all threads'.
    thread = threading.Thread(target=_take, args=(node, taken))
    thread.start()
    thread.join()
    return taken


def _take(node: Node, taken: dict[str, int]) -> None:
    try:
        namespace = os.open(f"/proc/{node.init_pid}/ns/mnt", os.O_RDONLY)
    except OSError:
        return
    kernel.unshare(kernel.FS)
    kernel.enter(namespace, kernel.NEWNS)
    os.close(namespace)
    for name, place in node.spec.all_places.items():
        if place.kept(name):
            taken[name] = kernel.copy_mount(node.where(name))
