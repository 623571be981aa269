"""Room on a disk: asked for before it is needed, given back, and what it looks like when there is none.

Whoever only reads a run imports this too, so libc is taken where it is called.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def reserve(fd: int, offset: int, length: int) -> bool:
    """Have blocks ready for `length` bytes from `offset` on; return False where there are none to be had."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.fallocate(fd, _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(length)) == 0)


def punch(fd: int, length: int) -> None:
    """Give the first `length` bytes of a file back to the file system, if it can do that; they read as zeros then."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(length))


def is_full(error: OSError) -> bool:
    """Return whether an error means that the disk or the quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_short(error: OSError) -> bool:
    """Return whether an error means that something has run short which may be there again later: space, descriptors."""
    return is_full(error) or error.errno in (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def room_not_needed() -> Iterator[None]:
    """Do without a file that helps, and without which things go on, where there is no room for it."""
    try:
        yield
    except OSError as error:
        if not is_short(error):
            raise


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Put a whole file in place: readers see the old one or the new one, never a part; `durable`: after a crash too."""
    from clusterctl.agent.linux.syscalls import write_atomically

    write_atomically(str(path), data, durable=durable)


_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Flags of fallocate(2): the size of the file stays as it is; blocks are given back."""


def make_private(folder: Path) -> None:
    """Make a folder that only its user can read, or take from others what an earlier umask left them.

    Raises:
        OSError: It cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():
        folder.chmod(0o700)
