"""Who may command a run, and when its controller was last heard: two small files that are overwritten in place.

In place, because a full disk must not keep a controller from stopping a run or from being heard.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from clusterctl.agent.linux import syscalls
from clusterctl.agent.protocol.commands import ErrorKind
from clusterctl.agent.protocol.request_errors import RequestError


def current(path: str) -> int:
    """Return the highest epoch seen, 0 where there was none yet."""
    text = syscalls.read_bytes(path).strip()
    return int(text) if text.isdigit() else 0


def admit(path: str, epoch: int) -> None:
    """Let a command of that epoch pass, and refuse lower ones from now on.

    Raises:
        RequestError: A controller with a higher epoch has taken over.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        seen = int(os.pread(fd, 64, 0).strip() or b"0")
        if epoch < seen:
            raise stale(epoch, seen)
        if epoch > seen:
            os.pwrite(fd, b"%020d\n" % epoch, 0)
    finally:
        os.close(fd)


def stale(epoch: int, seen: int) -> RequestError:
    """Return the error that a controller gets which has been replaced."""
    message = f"another controller has taken over: epoch {seen} is newer than {epoch}"
    return RequestError(ErrorKind.STALE_EPOCH, message)


def clock() -> float:
    """Return the time of leases and fences, in seconds. While the machine sleeps it goes on, as the head does."""
    return syscalls.read_boot_time()


def lease(path: str) -> float | None:
    """Return when a controller was last heard (`clock`), or `None` where nothing says so."""
    try:
        return float(syscalls.read_bytes(path))
    except ValueError:
        return None


def touch_lease(path: str) -> None:
    """Write down that a controller was heard just now."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, b"%020.3f\n" % clock(), 0)
        finally:
            os.close(fd)
