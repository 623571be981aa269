"""Who holds a lock, as the kernel tells it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_holder(lock: Path) -> int | None:
    """Return the pid of the controller that holds a run directory."""
    try:
        inode = lock.stat().st_ino
    except FileNotFoundError:
        return None
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        # The same number may be another file's on another file system.
        if f":{inode} " in line and fields[1] != "->" and _has_open(int(fields[4]), lock):
            return int(fields[4])
    return None


def _has_open(pid: int, file: Path) -> bool:
    try:
        return any(fd.samefile(file) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists())
    except (FileNotFoundError, PermissionError):
        return False


def is_locked(path: Path) -> bool:
    """Whether somebody holds a lock on a file or folder, be it a shared one."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
