"""Locks files of a run: only the controller that holds the lock of a run may change the run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import ClusterctlError, RefusedError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of flock(2) on file systems without locks, such as some network homes and NFS without its lock service."""

_ACQUIRE_TIMEOUT_S = 10.0
_PAUSE_S = 0.005


class LockedError(ClusterctlError):
    """Another process holds the lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """The controller that holds the lock of a run: the name of its machine, and its pid on this machine."""

    host: str
    pid: int


def take_lock(path: Path) -> int:
    """Take the lock, and write its holder into the file. Return the descriptor, which holds the lock until closed.

    Raises:
        LockedError: Another process holds the lock.
        RefusedError: The file system has no locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _acquire(fd):
            raise LockedError(f"{path} is locked")
    except LockedError:
        os.close(fd)
        raise
    except OSError as error:
        os.close(fd)
        if error.errno in _NO_LOCKS:
            raise RefusedError(
                f"files in {path.parent} cannot be locked: {error.strerror}",
                hint="set XDG_STATE_HOME to a folder on a local disk",
            ) from error
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps({"host": os.uname().nodename, "pid": os.getpid()}).encode(), 0)
    return fd


def _acquire(fd: int) -> bool:
    """Lock a file; return `False` if another controller holds the lock. Wait for readers: they lock it briefly."""
    deadline = time.monotonic() + _ACQUIRE_TIMEOUT_S
    while not _try_flock(fd, fcntl.LOCK_EX):
        if not _try_flock(fd, fcntl.LOCK_SH) or time.monotonic() >= deadline:
            return False
        fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(random.uniform(0, _PAUSE_S))
    return True


def _try_flock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against changes by other processes; wait for the lock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock; `False` if the file system has no locks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_flock(fd, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    finally:
        os.close(fd)


def read_holder(path: Path) -> LockHolder | None:
    """Return the last holder of the lock; `None` if the file names no holder."""
    try:
        written = json.loads(path.read_bytes())
        return LockHolder(host=str(written["host"]), pid=int(written["pid"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
