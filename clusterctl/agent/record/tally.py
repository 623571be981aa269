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

from clusterctl.agent.linux import proc, syscalls

if TYPE_CHECKING:
    from typing import Callable

_RECORD, _SENT = struct.Struct("<8Q"), struct.Struct("<Q")
"""So long that none lies in two pages: what is written at once is there at once."""
_BEGIN = 64
"""Bytes by whose sum the beginning of a file is known."""
UNKNOWN_FLOOR = 2**63
"""A floor that no file reaches: nothing of the file is to be read, its supervisor is still finding out about it."""


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


def _boot() -> int:
    return int(proc.read_boot_id().replace("-", "")[:15] or "0", 16)


def _sum(data: bytes) -> int:
    return len(data) << 32 | zlib.crc32(data)


class Tallies:
    """The records of an attempt, by rank. One that is not there is empty; what cannot be written is left out.

    Args:
        folder: Of the attempt.
    """

    def __init__(self, folder: str) -> None:
        # What is sent lies in a folder of its own: who watches the attempt's would be woken by each word of its own.
        self._tallies = _InPlace(os.path.join(folder, "tallies"), _RECORD)
        self._sent = _InPlace(os.path.join(folder, "sent", "offsets"), _SENT)

    def make(self, ranks: list[int]) -> None:
        """Make the files with room for all ranks.

        Raises:
            OSError: There is no space for them.
        """
        self._tallies.make(ranks)
        self._sent.make(ranks)

    def of(self, rank: int) -> Tally:
        """Return the record of a rank.

        Raises:
            OSError: It is there and cannot be opened.
        """
        *values, boot = self._tallies.get(rank)
        tally = Tally(*values, *self._sent.get(rank))
        if boot != _boot():
            # Nobody who wrote to the file is left, and what a crash made of it is nobody's doing: it counts as it is.
            tally.size = tally.sent = tally.base
            tally.floor = tally.begin = 0
        return tally

    def put(self, rank: int, tally: Tally) -> None:
        """Write all of a record but `sent`."""
        self._tallies.put(rank, (*astuple(tally)[:-1], _boot()))

    def note_sent(self, rank: int, end: int) -> None:
        """Write down up to where the output of a rank is handed on."""
        self._sent.put(rank, (end,))

    def close(self) -> None:
        """Give the descriptors back; the next access opens the files anew."""
        self._tallies.close()
        self._sent.close()


class _InPlace:
    """A file of records of one form, by rank."""

    def __init__(self, path: str, form: struct.Struct) -> None:
        self._path, self._form = path, form
        self._fd = -1

    def make(self, ranks: list[int]) -> None:
        os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
        self.close()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if ranks:
            size = self._form.size
            syscalls.reserve_blocks(self._fd, min(ranks) * size, (max(ranks) + 1 - min(ranks)) * size)

    def get(self, rank: int) -> tuple[int, ...]:
        try:
            fd = self._open()
        except FileNotFoundError:
            return self._form.unpack(bytes(self._form.size))
        place = (self._form.size, rank * self._form.size)
        data = os.pread(fd, *place)
        # Whoever writes may be amid it: what reads the same twice is whole.
        while data != (again := os.pread(fd, *place)):
            data = again
        return self._form.unpack(data.ljust(self._form.size, b"\0"))

    def put(self, rank: int, values: tuple[int, ...]) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._open(), self._form.pack(*values), rank * self._form.size)

    def _open(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
