"""Epoch, lease and fence of a run on this node: small files that decide who may command it and for how long.

Epoch and lease are overwritten in place, so a full disk keeps no controller from stopping a run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

from clusterctl.agent.linux import syscalls
from clusterctl.agent.protocol.command_messages import ErrorKind, RequestError

if TYPE_CHECKING:
    from clusterctl.agent.protocol.record_types import ExitRecord

_FENCE_WRITE_TIMEOUT_S = 2.0
"""Signals wait this long for the fence file: a disk that hangs must not keep the workers alive."""


def read_epoch(path: str) -> int:
    """Return the highest epoch that this node has accepted, or 0."""
    text = syscalls.read_bytes(path).strip()
    return int(text) if text.isdigit() else 0


def check_epoch(path: str, epoch: int) -> None:
    """Accept a command of this epoch, and refuse lower epochs from now on.

    Raises:
        RequestError: A controller with a higher epoch has taken over.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        seen = int(os.pread(fd, 64, 0).strip() or b"0")
        if epoch < seen:
            message = f"another controller has taken over: epoch {seen} is newer than {epoch}"
            raise RequestError(ErrorKind.STALE_EPOCH, message)
        if epoch > seen:
            os.pwrite(fd, b"%020d\n" % epoch, 0)
    finally:
        os.close(fd)


def read_lease_clock() -> float:
    """Return the time in seconds on the clock of leases and fences, which goes on while the machine sleeps."""
    return syscalls.read_boot_time()


def read_lease(path: str) -> float | None:
    """Return the time of the controller's last frame (`read_lease_clock`), or `None` without a lease file."""
    try:
        return float(syscalls.read_bytes(path))
    except ValueError:
        return None


def touch_lease(path: str) -> None:
    """Record that a controller's frame has just arrived."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, b"%020.3f\n" % read_lease_clock(), 0)
        finally:
            os.close(fd)


def write_fence(path: str) -> None:
    """Record, before the first signal, that a waiter ends the attempt because no controller is there."""
    # Only a waiter whose fence has expired gets here; `serve` does without this import.
    import threading

    now = time.monotonic()

    def write() -> None:
        with contextlib.suppress(OSError):
            syscalls.write_json(path, {"mono": now})

    if read_fence_time(path) is None:
        writing = threading.Thread(target=write, daemon=True)
        writing.start()
        writing.join(_FENCE_WRITE_TIMEOUT_S)


def read_fence_time(path: str, end: ExitRecord | None = None) -> float | None:
    """Return when a waiter began to end the attempt (monotonic seconds), or `None` if no waiter did.

    Args:
        path: The fence file.
        end: The exit record of a worker; the time is 0 if only this record mentions a fence.
    """
    since = (syscalls.read_json(path) or {}).get("mono")
    if isinstance(since, float):
        return since
    return 0.0 if end is not None and end.get("fenced") else None
