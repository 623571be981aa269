"""Output that is not replicated yet, read ahead of the replication, so that a view need not wait for it.

A piece is put at its own place in a file in memory, and is read there as it would be in the replica. Once the replica
has come as far as the view, the view goes on in the replica.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.logs.output_files import OutputFile
    from clusterctl.logs.stream import OutputStream

WINDOW = 64 * 1024
"""Bytes of a file's end in which a view's last lines are looked for."""
LAG = 256 * 1024
"""A replica that is nearer to its file than this is read itself."""
_PAUSE = 0.25


class Piece(NamedTuple):
    """Bytes of a worker's output file from `offset` on; on its node the file has `size` bytes."""

    node: str
    attempt: int
    rank: int
    offset: int
    size: int
    data: bytes


class Source(Protocol):
    """Whoever can read on the nodes: a live controller."""

    def ends(self) -> list[Piece]:
        """Return the end of every output file of the attempt that runs."""

    def beyond(self, places: Sequence[tuple[OutputFile, int]]) -> list[Piece]:
        """Return what files hold from these offsets on, as far as one question goes."""


class Ahead:
    """The streams of a view that are ahead of their replicas."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._streams: dict[OutputStream, tuple[OutputFile, int]] = {}
        self._asked = float("-inf")

    def ends(self) -> list[Piece]:
        """Return the ends of all files; which replicas lag is for the caller to see."""
        return self._source.ends()

    def put(self, stream: OutputStream, piece: Piece) -> None:
        """Let a stream read a piece instead of its replica."""
        # Imported by who lags: most views never do.
        from clusterctl.agent.linux.syscalls import memory_file

        file, old = self._streams.get(stream, (stream.file, -1))
        descriptor = memory_file("clusterctl-ahead")
        os.pwrite(descriptor, piece.data, piece.offset)
        stream.file = replace(file, path=f"/proc/self/fd/{descriptor}")
        self._streams[stream] = (file, descriptor)
        if old >= 0:
            os.close(old)

    def go_on(self, now: float) -> None:
        """Let streams go on in their replicas where these have come so far; else read what is next, now and then.

        Args:
            now: Any clock, in seconds.
        """
        for stream, (file, descriptor) in list(self._streams.items()):
            if _size(file.path) >= stream.offset:
                stream.file = file
                del self._streams[stream]
                os.close(descriptor)
        if not self._streams or abs(now - self._asked) < _PAUSE:
            return
        self._asked = now
        waiting = {(f.node, f.attempt, f.rank): s for s, (f, _) in self._streams.items() if s.offset >= s.size()}
        for piece in self._source.beyond([(self._streams[s][0], s.offset) for s in waiting.values()]):
            stream = waiting[piece.node, piece.attempt, piece.rank]
            if piece.offset == stream.offset and piece.data:
                self.put(stream, piece)

    def close(self) -> None:
        """Let all streams go on in their replicas; what was read ahead is forgotten."""
        for stream, (file, descriptor) in self._streams.items():
            stream.file = file
            os.close(descriptor)
        self._streams.clear()


def first_line(piece: Piece) -> int:
    """Return where the first whole line of a piece begins; a piece of one line begins with itself."""
    return piece.offset + piece.data.find(b"\n") + 1 if piece.offset else 0


def lags(file: OutputFile, piece: Piece) -> bool:
    """Return whether a replica is so far behind that a view should not wait for it."""
    return piece.size - _size(file.path) > LAG


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
