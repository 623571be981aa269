"""Epoch, lease and fence files of a run: which controller may command the run, and when a run without one ends.

Epoch and lease files are overwritten in place, so that a controller can stop a run even if the disk is full.
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
"""Timeout in seconds for writing the fence file; after that, the waiter ends the workers without the file."""


def read_epoch(path: str) -> int:
    """Return the highest epoch that this node has accepted for a run, or 0."""
    text = syscalls.read_or_empty(path).strip()
    return int(text) if text.isdigit() else 0


def check_epoch(path: str, epoch: int) -> None:
    """Check that no controller with a higher epoch has commanded the run, and store the epoch.

    Raises:
        RequestError: The node knows a higher epoch.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        highest = int(os.pread(fd, 64, 0).strip() or b"0")
        if epoch < highest:
            message = f"another controller has taken over the run: its epoch {highest} is higher than {epoch}"
            raise RequestError(ErrorKind.STALE_EPOCH, message)
        if epoch > highest:
            os.pwrite(fd, b"%020d\n" % epoch, 0)
    finally:
        os.close(fd)


def read_lease_clock() -> float:
    """Return the time in seconds of the clock of leases and fences, which also runs while the machine is suspended."""
    return syscalls.read_boot_time()


def read_last_renewal(path: str) -> float | None:
    """Return the time (`read_lease_clock`) of the controller's last frame, or `None` without a lease file."""
    try:
        return float(syscalls.read_or_empty(path))
    except ValueError:
        return None


def renew_lease(path: str) -> None:
    """Write the present time to the lease file, because a frame of the controller has arrived."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, b"%020.3f\n" % read_lease_clock(), 0)
        finally:
            os.close(fd)


def write_fence_file(path: str) -> None:
    """Write the fence file, which records that a waiter ends the attempt because the controller was silent too long."""
    # This import is lazy, because only a waiter whose fence has expired needs threads.
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
    """Return when a waiter began to end the attempt (monotonic seconds), or `None` if no waiter has ended it.

    Args:
        path: The fence file.
        end: The exit record of a worker. If there is no fence file but a fence ended this worker, the result is 0.
    """
    since = (syscalls.read_json(path) or {}).get("mono")
    if isinstance(since, float):
        return since
    return 0.0 if end is not None and end.get("fenced") else None
