"""The journal of a run on a node: one JSON object a line, sequence numbers that rise by one, one writer."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from typing import TYPE_CHECKING

from clusterctl.agent.linux import proc, syscalls
from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol import frames

if TYPE_CHECKING:
    from collections.abc import Iterator

_RESERVE = 1 << 20
_LOW = 256 << 10
_PIECE = 64 << 10
"""Bytes of a journal that are read at once: that of a long run has more than there is memory for."""


class Reader:
    """Reads the complete lines of a journal as it grows, and holds no descriptor in between.

    A torn line is not passed over: it is read once it is whole, or what stands in its place where it was cut off.

    Attributes:
        anew: The last look found another file, or one that had lost lines, and read it from its beginning.
    """

    def __init__(self, path: str) -> None:
        self.anew = False
        self._path = path
        self._position = self._inode = 0

    def lines(self) -> Iterator[bytes]:
        """Look at the file, and yield the lines that are new, without their ends, as they are read piece by piece.

        Those that are not taken are read again at the next look.
        """
        self.anew = False
        try:
            status = os.stat(self._path)
        except OSError:
            return iter(())
        if status.st_ino != self._inode or status.st_size < self._position:
            self.anew = self._inode != 0
            self._inode, self._position = status.st_ino, 0
        return iter(()) if status.st_size == self._position else self._new()

    def _new(self) -> Iterator[bytes]:
        with contextlib.suppress(OSError), open(self._path, "rb", buffering=_PIECE) as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line[:-1]

    def events(self) -> Iterator[tuple[node_events.Stamp, node_events.Event]]:
        """Look as `lines` does, and yield what the new ones say; those of kinds that we do not know are left out."""
        return _decoded(self.lines())


def _decoded(lines: Iterator[bytes]) -> Iterator[tuple[node_events.Stamp, node_events.Event]]:
    for line in lines:
        with contextlib.suppress(frames.FrameError):
            entry = node_events.decode_event(line)
            if entry is not None:
                yield entry


def read(path: str) -> Iterator[tuple[node_events.Stamp, node_events.Event]]:
    """Yield what a journal says; a torn last line and kinds that we do not know are left out."""
    return Reader(path).events()


class Journal:
    """The writer. Only the supervisor of a run has one.

    Space is kept reserved beyond the end of the file, so that a full disk does not silence it. What even that has no
    room for waits, and is written in its order once there is some: `flush`.
    """

    def __init__(self, path: str) -> None:
        """Open the journal, cut off a line that a crash tore, and go on with its numbers."""
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._waiting: deque[bytes] = deque()
        self._end = 0
        self.seq = 0
        for line in Reader(path).lines():
            self._end += len(line) + 1
            with contextlib.suppress(frames.FrameError):
                entry = node_events.decode_event(line)
                self.seq = self.seq + 1 if entry is None else entry[0].seq
        os.ftruncate(self._fd, self._end)
        self._reserved = 0
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        if self._reserved - self._end >= _LOW:
            return
        with contextlib.suppress(OSError):
            syscalls.reserve_blocks(self._fd, self._end, _RESERVE)
            self._reserved = self._end + _RESERVE

    def append(self, event: node_events.Event) -> node_events.Stamp:
        """Write one event down, behind those that wait; who follows sees it as soon as it is written."""
        self.seq += 1
        stamp = node_events.Stamp(self.seq, time.time(), time.monotonic(), proc.read_boot_id())
        self._waiting.append(node_events.encode_event(stamp, event).encode() + b"\n")
        self.flush()
        return stamp

    def flush(self) -> bool:
        """Write what waits; return whether nothing waits any more."""
        while self._waiting:
            try:
                syscalls.write_all(self._fd, self._waiting[0])
            except OSError:
                # A part of a line would spoil the next one. This gives back the reserve, too: it was not enough.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._end)
                self._reserved = self._end
                return False
            self._end += len(self._waiting.popleft())
            self._keep_reserve()
        return True

    def close(self) -> None:
        """Give the space back that is reserved behind what was written; who writes on opens the journal anew."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end)
        os.close(self._fd)
