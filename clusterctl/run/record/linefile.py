"""A journal on the head: whole lines in their order, whatever the disk has to say about it.

Space is reserved beyond the end of the file, so that a controller can still write down that the disk is full, and how
its run ends. Lines that even that has no room for wait in memory.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING

from clusterctl.run.record.disk import is_short, reserve

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

_PIECE = 64 * 1024


class LineFile:
    """Appends lines; there must be no other writer.

    Args:
        path: Made with its folder at the first line; what a crash left behind the last whole line is cut off.
        reserve: Bytes kept free beyond the end, where the file system can do that.
    """

    def __init__(self, path: Path, reserve: int) -> None:
        self._path, self._reserve = path, reserve
        self._fd = -1
        self._size = self._reserved = 0
        self._waiting: deque[bytes] = deque()

    @property
    def size(self) -> int:
        """Bytes of the file, with those that wait."""
        return self._size + sum(len(line) for line in self._waiting)

    def append(self, line: bytes) -> bool:
        """Write a line, after those that wait; return False where it has to wait too: see `is_short`."""
        self._waiting.append(line)
        return self.flush()

    def flush(self) -> bool:
        """Write what waits; return whether all of it is written.

        Raises:
            OSError: The file cannot be written, and waiting will not help.
        """
        try:
            if self._fd < 0:
                self._open()
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not is_short(error):
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
        if self._reserved - self._size < self._reserve // 2 and reserve(self._fd, self._size, self._reserve):
            self._reserved = self._size + self._reserve


def drop_torn_line(path: Path) -> None:
    """Cut what a crash left behind the last whole line, so that the next line stands by itself."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            whole = _end_of_lines(file, size)
    except FileNotFoundError:
        return
    if whole != size:
        os.truncate(path, whole)


def _end_of_lines(file: BinaryIO, size: int) -> int:
    """Return where the last whole line ends; only the end of the file is read for it."""
    end = size
    while end > 0:
        begin = max(0, end - _PIECE)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
