"""Room on a disk: asked for before it is needed, given back, and what it looks like when there is none.

Whoever only reads a run imports this too, so libc is taken where it is called.

A journal on the head: whole lines in their order, whatever the disk has to say about it.

Space is reserved beyond the end of the file, so that a controller can still write down that the disk is full, and how
its run ends. Lines that even that has no room for wait in memory.

The files of replicas that are open: so many that others find room too, those in use before those that were.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


def reserve_space(fd: int, offset: int, length: int) -> bool:
    """Have blocks ready for `length` bytes from `offset` on; return False where there are none to be had."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.fallocate(fd, _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(length)) == 0)


def free_head(fd: int, length: int) -> None:
    """Give the first `length` bytes of a file back to the file system, if it can do that; they read as zeros then."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(length))


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that the disk or the quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_shortage(error: OSError) -> bool:
    """Return whether an error means that something has run short which may be there again later: space, descriptors."""
    return is_disk_full(error) or error.errno in (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def ignore_shortage() -> Iterator[None]:
    """Do without a file that helps, and without which things go on, where there is no room for it."""
    try:
        yield
    except OSError as error:
        if not is_shortage(error):
            raise


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Put a whole file in place: readers see the old one or the new one, never a part; `durable`: after a crash too."""
    from clusterctl.agent.linux.syscalls import write_atomically

    write_atomically(str(path), data, durable=durable)


_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Flags of fallocate(2): the size of the file stays as it is; blocks are given back."""


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its user can read, or take from others what an earlier umask left them.

    Raises:
        OSError: It cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():
        folder.chmod(0o700)


_LINE_READ_BYTES = 64 * 1024


class LineFile:
    """Appends lines; there must be no other writer.

    Args:
        path: Made with its folder at the first line; what a crash left behind the last whole line is cut off.
        reserve: Bytes kept free beyond the end, where the file system can do that.
    """

    def __init__(self, path: Path, reserve_bytes: int) -> None:
        self._path, self._reserve_bytes = path, reserve_bytes
        self._fd = -1
        self._size = self._reserved = 0
        self._waiting_lines: deque[bytes] = deque()

    @property
    def size(self) -> int:
        """Bytes of the file, with those that wait."""
        return self._size + sum(len(line) for line in self._waiting_lines)

    def append(self, line: bytes) -> bool:
        """Write a line, after those that wait; return False where it has to wait too: see `is_short`."""
        self._waiting_lines.append(line)
        return self.flush()

    def flush(self) -> bool:
        """Write what waits; return whether all of it is written.

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
            if not is_shortage(error):
                raise
            return False
        return True

    def sync(self) -> None:
        """Have what is written on the disk, as far as the disk can be had to do it."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._fd)

    def close(self) -> None:
        """Give back the reserve and close the file."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(self._path)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = self._reserved = os.fstat(self._fd).st_size
        self._keep_reserve()

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            # A part of a line would spoil the next one. Beyond the end lies the reserve, which this gives back.
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


def drop_torn_line(path: Path) -> None:
    """Cut what a crash left behind the last whole line, so that the next line stands by itself."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            end_of_lines = _find_end_of_lines(file, size)
    except FileNotFoundError:
        return
    if end_of_lines != size:
        os.truncate(path, end_of_lines)


def _find_end_of_lines(file: BinaryIO, size: int) -> int:
    """Return where the last whole line ends; only the end of the file is read for it."""
    end = size
    while end > 0:
        begin = max(0, end - _LINE_READ_BYTES)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


class ReplicaFiles:
    """Open files by node and name; the one that was used least recently is closed for another.

    Args:
        place: Tells where the replica of a node's file lies; asked when it is opened, not with each piece.
        limit: How many may be open at once; default half of what this process may have. Sockets and journals need
            the rest.
    """

    def __init__(self, find_path: Callable[[str, str], Path], limit: int | None = None) -> None:
        self._find_path = find_path
        self._limit = max(1, limit or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._open: OrderedDict[tuple[str, str], int] = OrderedDict()

    def open_replica(self, node: str, file: str) -> int:
        """Return a descriptor to read and write a replica, made with its folder if need be; good until the next call.

        Raises:
            OSError: It cannot be opened.
        """
        key = node, file
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        path = self._find_path(node, file)
        self._close_oldest(self._limit - 1)
        try:
            fd = _open_file(path)
        except OSError as error:
            if not is_shortage(error) or not self._open:
                raise
            self._close_oldest(len(self._open) // 2)
            fd = _open_file(path)
        self._open[key] = fd
        return fd

    def close_matching(self, matches: Callable[[str, str], bool]) -> None:
        """Close those of which `over` says, by node and file, that nothing more is written to them."""
        for key in [key for key in self._open if matches(*key)]:
            os.close(self._open.pop(key))

    def close(self) -> None:
        """Close all of them."""
        self._close_oldest(0)

    def _close_oldest(self, count: int) -> None:
        while len(self._open) > count:
            os.close(self._open.popitem(last=False)[1])


def _open_file(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
