"""The journal of a run on a node: one JSON object a line, sequence numbers that rise by one, one writer."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from clusterctl.agent import proc, protocol, system

if TYPE_CHECKING:
    from collections.abc import Iterator

_RESERVE = 1 << 20
_LOW = 256 << 10


def read(path: str) -> Iterator[tuple[protocol.Stamp, protocol.Event]]:
    """Yield what a journal says; a torn last line and kinds that we do not know are left out."""
    for line in complete_lines(path):
        with contextlib.suppress(protocol.FrameError):
            entry = protocol.decode_event(line)
            if entry is not None:
                yield entry


def complete_lines(path: str) -> list[bytes]:
    """Return the lines of a file that are complete."""
    try:
        with open(path, "rb") as file:
            return file.read().split(b"\n")[:-1]
    except OSError:
        return []


class Journal:
    """The writer. Only the supervisor of a run has one.

    Space is kept reserved beyond the end of the file, so that a full disk does not silence it.
    """

    def __init__(self, path: str) -> None:
        """Open the journal, cut off a line that a crash tore, and go on with its numbers."""
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end = 0
        self.seq = 0
        for line in complete_lines(path):
            self._end += len(line) + 1
            with contextlib.suppress(protocol.FrameError):
                entry = protocol.decode_event(line)
                self.seq = self.seq + 1 if entry is None else entry[0].seq
        os.ftruncate(self._fd, self._end)
        self._reserved = 0
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        if self._reserved - self._end >= _LOW:
            return
        with contextlib.suppress(OSError):
            system.reserve(self._fd, self._end, _RESERVE)
            self._reserved = self._end + _RESERVE

    def append(self, event: protocol.Event) -> protocol.Stamp:
        """Write one event down; who follows sees it at once.

        Raises:
            OSError: Not even the reserve was enough.
        """
        stamp = protocol.Stamp(self.seq + 1, time.time(), time.monotonic(), proc.boot_id())
        line = protocol.encode_event(stamp, event).encode() + b"\n"
        try:
            system.write_all(self._fd, line)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self.seq = stamp.seq
        self._end += len(line)
        self._keep_reserve()
        return stamp

    def sync(self) -> None:
        """Make sure that it outlives the machine's power."""
        os.fdatasync(self._fd)
