"""The lock of a run: held while its controller is alive; says on which machine that is, which may be another one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.errors import ClusterctlError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What flock(2) says on file systems without locks: some network homes, and NFS whose lock service is not there."""


class HeldError(ClusterctlError):
    """Somebody else holds the lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The controller that holds a run: the name of its machine, and its pid there."""

    host: str
    pid: int


def take(path: Path) -> int:
    """Take the lock, and say in it who has it; return the descriptor that holds it until it is closed.

    Raises:
        HeldError: Another process has it.
        RefusedError: The file system has no locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise HeldError(f"{path} is locked") from error
        if error.errno in _NO_LOCKS:
            raise RefusedError(
                f"files in {path.parent} cannot be locked: {error.strerror}",
                hint="set XDG_STATE_HOME to a folder on a local disk",
            ) from error
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps({"host": os.uname().nodename, "pid": os.getpid()}).encode(), 0)
    return fd


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until nobody else changes what lies in a folder, and keep others from it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def is_held(path: Path) -> bool:
    """Return whether somebody holds the lock; where there are no locks nobody does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(fd)
    return False


def holder(path: Path) -> Holder | None:
    """Return who took the lock last; `None` where nobody has said so."""
    try:
        written = json.loads(path.read_bytes())
        return Holder(host=str(written["host"]), pid=int(written["pid"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
