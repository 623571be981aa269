"""What is known of each output file of an attempt, in a small file that is overwritten in place.

A byte of output keeps its offset for good, although its file may lose its front (punched out when space runs short)
or everything (a worker that opens `/dev/stderr` with O_TRUNC empties its own output): `base` says which byte of the
output the file begins with now. In place, because a full disk must not keep anybody from saying what is gone.

All of a record but `sent` is written by the supervisor; `sent` by whoever sends the output to a controller.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from clusterctl.agent import system

if TYPE_CHECKING:
    from typing import Callable

_WHOLE, _RECORD, _SENT = struct.Struct("<8Q"), struct.Struct("<7Q"), struct.Struct("<Q")
_BEGIN = 64
"""Bytes by whose sum the beginning of a file is known."""


@dataclass
class Tally:
    """One output. Offsets are bytes of the output, not of its file.

    Attributes:
        base: What the file begins with.
        first_valid: What lies before it is gone; never below `base`.
        size: Up to where the output went when it was last looked at.
        floor: Bytes that the file has allocated at least, unless somebody emptied it; 0 where nobody can tell.
        begin: Where nobody can tell, how many bytes (upper half) at the beginning of the file have which sum.
        lost: Bytes that were given up and that no head has, all together.
        replicated: Up to where it is safe on the head.
        sent: Up to where it was handed to a connection.
    """

    base: int = 0
    first_valid: int = 0
    size: int = 0
    floor: int = 0
    begin: int = 0
    lost: int = 0
    replicated: int = 0
    sent: int = 0

    def emptied(self, status: os.stat_result, first: Callable[[int], bytes]) -> bool:
        """Return whether a file has been emptied since this was written, by whomever.

        Its size alone does not tell, for it may have grown again; but what was reserved beyond its end is gone then.
        Where the filesystem reserves nothing, other bytes at its beginning tell.

        Args:
            status: The file as it is now.
            first: Reads so many bytes of its beginning.
        """
        if self.base + status.st_size < max(self.size, self.sent) or status.st_blocks * 512 < self.floor:
            return True
        return self.begin > 0 and _sum(first(self.begin >> 32)) != self.begin

    def learn(self, first: Callable[[int], bytes]) -> bool:
        """Take note of how the file begins, where nothing else would tell; return whether there was something new."""
        if self.floor or self.first_valid > self.base:
            begin = 0
        elif self.begin >> 32 >= min(_BEGIN, self.size - self.base):
            return False
        else:
            begin = _sum(first(_BEGIN))
        changed, self.begin = begin != self.begin, begin
        return changed


def _sum(data: bytes) -> int:
    return len(data) << 32 | zlib.crc32(data)


class Tallies:
    """The records of an attempt, by rank. One that is not there is empty; what cannot be written is left out."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def make(self, ranks: list[int]) -> None:
        """Make the file with room for all ranks.

        Raises:
            OSError: There is no space for it.
        """
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if ranks:
            system.reserve(self._fd, min(ranks) * _WHOLE.size, (max(ranks) + 1 - min(ranks)) * _WHOLE.size)

    def of(self, rank: int) -> Tally:
        """Return the record of a rank.

        Raises:
            OSError: The file is there and cannot be opened.
        """
        try:
            fd = self._open()
        except FileNotFoundError:
            return Tally()
        data = os.pread(fd, _WHOLE.size, rank * _WHOLE.size)
        # Whoever writes may be amid it: what reads the same twice is whole.
        while data != (again := os.pread(fd, _WHOLE.size, rank * _WHOLE.size)):
            data = again
        return Tally(*_WHOLE.unpack(data.ljust(_WHOLE.size, b"\0")))

    def put(self, rank: int, tally: Tally) -> None:
        """Write all of a record but `sent`."""
        with contextlib.suppress(OSError):
            os.pwrite(self._open(), _RECORD.pack(*astuple(tally)[:-1]), rank * _WHOLE.size)

    def note_sent(self, rank: int, end: int) -> None:
        """Write down up to where the output of a rank is handed on."""
        with contextlib.suppress(OSError):
            os.pwrite(self._open(), _SENT.pack(end), rank * _WHOLE.size + _RECORD.size)

    def _open(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        return self._fd

    def close(self) -> None:
        """Give the descriptor back; the next access opens the file anew."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
