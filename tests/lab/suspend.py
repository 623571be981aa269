"""A node that sleeps and wakes, as a laptop or a virtual machine that is suspended.

All its processes stand still and its link is dead, while the head's clock goes on. Afterwards CLOCK_MONOTONIC of what
its ssh sessions have started has not moved, and the other clocks have. What waits in the kernel with a deadline is
woken as if the deadline had passed, which a real machine would put off.
"""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.compiled import compiled
from tests.lab.spec import NodeSpec

if TYPE_CHECKING:
    from tests.lab.node import Node

ASLEEP: Final = "/run/asleep"
LIBRARY: Final = "libasleep.so"


def sleeper(spec: NodeSpec | None = None) -> NodeSpec:
    """Return the spec of a node that can be suspended."""
    spec = spec or NodeSpec()
    folder = str(compiled(Path(__file__).with_name("asleep.c"), LIBRARY, "-shared", "-fPIC"))
    return replace(
        spec,
        cgroup=True,
        env={**spec.env, "LD_PRELOAD": f"{folder}/{LIBRARY}", "ASLEEP": ASLEEP},
        expose=(*spec.expose, folder),
        files={**spec.files, ASLEEP: "\0" * 8},
    )


def suspend(node: Node) -> float:
    """Let a node fall asleep; returns when, for `wake`."""
    node.pause()
    return time.monotonic()


def wake(node: Node, since: float) -> None:
    """Wake it up; its monotonic clock goes on from where it stood."""
    file = node.path(ASLEEP)
    (before,) = struct.unpack("<q", file.read_bytes())
    with file.open("r+b") as same:
        same.write(struct.pack("<q", before + int((time.monotonic() - since) * 1e9)))
    node.resume()
