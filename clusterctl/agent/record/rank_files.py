"""What a waiter writes down: that its worker was started, how it ended, and that it ends the attempt for a fence."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, cast

from clusterctl.agent.linux import syscalls

if TYPE_CHECKING:
    from clusterctl.agent.protocol.process_types import ExitRecord, SpawnRecord


_FENCE_WRITTEN_SECONDS = 2.0
"""For so long signals wait for the fence to be on the disk: workers shall not outlive a disk that hangs."""


def read_spawn(path: str) -> SpawnRecord | None:
    """Return what a spawn file says."""
    return cast("SpawnRecord | None", syscalls.read_json(path))


def read_exit(path: str) -> ExitRecord | None:
    """Return what an exit file says."""
    return cast("ExitRecord | None", syscalls.read_json(path))


def begin_fence(path: str) -> None:
    """Write down, before the first signal, that an attempt is being ended because its controller is gone."""
    now = time.monotonic()

    def write() -> None:
        with contextlib.suppress(OSError):
            syscalls.write_json(path, {"mono": now})

    if fenced_since(path) is None:
        writing = threading.Thread(target=write, daemon=True)
        writing.start()
        writing.join(_FENCE_WRITTEN_SECONDS)


def fenced_since(path: str, end: ExitRecord | None = None) -> float | None:
    """Return when a waiter began to end the attempt (the node's monotonic clock), or `None` where none did.

    Args:
        path: What `begin_fence` wrote.
        end: What the waiter of a worker says of its end; where it alone tells of a fence, the time is 0.
    """
    since = (syscalls.read_json(path) or {}).get("mono")
    if isinstance(since, float):
        return since
    return 0.0 if end is not None and end.get("fenced") else None
