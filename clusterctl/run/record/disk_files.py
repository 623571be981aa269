"""Writes whole files and journals on the head, and handles a full disk.

A journal reserves space beyond its end, so that a controller can still record a full disk and the end of its run. Lines
wait in memory while the disk has no space for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from clusterctl.agent.linux import syscalls

_LIBC = ctypes.CDLL(None, use_errno=True)


def reserve_space(fd: int, offset: int, length: int) -> bool:
    """Allocate `length` bytes of a file from `offset` on; return False if the disk has no space for them."""
    return bool(_LIBC.fallocate(fd, _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(length)) == 0)


def free_file_start(fd: int, length: int) -> None:
    """Free the first `length` bytes of a file, if the file system supports this. Freed bytes read as zeros."""
    _LIBC.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(length))


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that the disk or the quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_resource_shortage(error: OSError) -> bool:
    """Return whether an error may go away by itself: no space on the disk, or no file descriptors."""
    return is_disk_full(error) or error.errno in (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def ignore_resource_shortage() -> Iterator[None]:
    """Ignore a full disk and a lack of file descriptors, while an optional file is written."""
    try:
        yield
    except OSError as error:
        if not is_resource_shortage(error):
            raise


def write_atomically(path: Path, data: bytes, mode: int = 0o600, *, durable: bool = False) -> None:
    """Write a file so that readers see the old or the new content, never a part of it.

    With `durable`, the file is also complete after a crash of the machine.
    """
    syscalls.write_atomically(str(path), data, mode, durable=durable)


_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Flags of fallocate(2). They keep the size of the file, and free blocks of the file."""


def make_private_folder(folder: Path) -> None:
    """Create a folder that only the user can read. If it exists, remove the permissions of other users.

    Raises:
        OSError: The folder cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():
        folder.chmod(0o700)


_LINE_READ_BYTES = 64 * 1024


class LineFile:
    """Appends lines to a file that has no other writer.

    Args:
        path: The file. The first write creates the file and its folder, or removes an incomplete last line after a
            crash.
        reserve_bytes: Bytes reserved beyond the end, if the file system supports it.
    """

    def __init__(self, path: Path, reserve_bytes: int) -> None:
        self._path, self._reserve_bytes = path, reserve_bytes
        self._fd = -1
        self._size = self._reserved = 0
        self._waiting_lines: deque[bytes] = deque()

    @property
    def size(self) -> int:
        """The size of the file in bytes, including the waiting lines."""
        return self._size + sum(len(line) for line in self._waiting_lines)

    def append(self, line: bytes) -> bool:
        """Write a line after the waiting lines. Return False if it has to wait (see `is_resource_shortage`)."""
        self._waiting_lines.append(line)
        return self.flush()

    def flush(self) -> bool:
        """Write the waiting lines; return whether no line waits any more.

        Raises:
            OSError: The file cannot be written, and waiting will not help.
        """
        try:
            if self._fd < 0:
                self._open()
            while self._waiting_lines:
                self._write(self._waiting_lines[0])
                self._waiting_lines.popleft()
        except OSError as error:
            if not is_resource_shortage(error):
                raise
            return False
        return True

    def sync(self) -> None:
        """Flush the file to the disk; ignore errors."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._fd)

    def close(self) -> None:
        """Free the reserved space and close the file."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        remove_torn_line(self._path)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = self._reserved = os.fstat(self._fd).st_size
        self._keep_reserve()

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            # An incomplete line would damage the next line. Truncation also frees the reserve.
            os.ftruncate(self._fd, self._size)
            self._reserved = self._size
            raise
        self._size += len(line)
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        if self._reserved - self._size < self._reserve_bytes // 2 and reserve_space(
            self._fd, self._size, self._reserve_bytes
        ):
            self._reserved = self._size + self._reserve_bytes


def remove_torn_line(path: Path) -> None:
    """Remove an incomplete last line after a crash, so that it does not damage the next line."""
    try:
        with path.open("rb+") as file:
            size = end = file.seek(0, os.SEEK_END)
            newline = -1
            while end > 0 and newline < 0:
                begin = max(0, end - _LINE_READ_BYTES)
                file.seek(begin)
                newline = file.read(end - begin).rfind(b"\n")
                end = begin
            if end + newline + 1 != size:
                file.truncate(end + newline + 1)
    except FileNotFoundError:
        return
