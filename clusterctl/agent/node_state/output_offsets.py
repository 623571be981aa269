"""What is known of each output file of an attempt, in a small file that is overwritten in place.

A byte of output keeps its offset for good, although its file may lose its front (punched out when space runs short)
or everything (a worker that opens `/dev/stderr` with O_TRUNC empties its own output): `base` says which byte of the
output the file begins with now. In place, because a full disk must not keep anybody from saying what is gone.

All of a record but `sent` is written by the supervisor; `sent` by whoever sends the output to a controller.

The front of a time index, which is given up with the output that it tells of: 16 B a second are much in a long run.

What is given up reads as zeros, and no record is all zeros: so the file itself says where it begins.

Reads a piece of a worker's output, or notices that the file is not what it was: a worker may have emptied it.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.linux import proc, syscalls
from clusterctl.agent.protocol import run_files

if TYPE_CHECKING:
    from typing import Callable


_OFFSETS_RECORD, _SENT_RECORD = struct.Struct("<8Q"), struct.Struct("<Q")
"""So long that none lies in two pages: what is written at once is there at once."""
_CHECKSUM_BYTES = 64
"""Bytes by whose sum the beginning of a file is known."""
UNKNOWN_MIN_ALLOCATED = 2**63
"""A floor that no file reaches: nothing of the file is to be read, its supervisor is still finding out about it."""


@dataclass
class OutputOffsets:
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

    file_start: int = 0
    first_valid: int = 0
    size: int = 0
    min_allocated: int = 0
    head_checksum: int = 0
    lost: int = 0
    replicated: int = 0
    sent: int = 0

    def is_emptied(self, status: os.stat_result, first: Callable[[int], bytes]) -> bool:
        """Return whether a file has been emptied since this was written, by whomever.

        Its size alone does not tell, for it may have grown again; but what was reserved beyond its end is gone then.
        Where the filesystem reserves nothing, other bytes at its beginning tell.

        Args:
            status: The file as it is now.
            first: Reads so many bytes of its beginning.
        """
        if self.file_start + status.st_size < max(self.size, self.sent) or status.st_blocks * 512 < self.min_allocated:
            return True
        return self.head_checksum > 0 and _checksum(first(self.head_checksum >> 32)) != self.head_checksum

    def update_head_checksum(self, first: Callable[[int], bytes]) -> bool:
        """Take note of how the file begins, where nothing else would tell; return whether there was something new."""
        if self.min_allocated or self.first_valid > self.file_start:
            begin = 0
        elif self.head_checksum >> 32 >= min(_CHECKSUM_BYTES, self.size - self.file_start):
            return False
        else:
            begin = _checksum(first(_CHECKSUM_BYTES))
        changed, self.head_checksum = begin != self.head_checksum, begin
        return changed


def _boot_number() -> int:
    return int(proc.read_boot_id().replace("-", "")[:15] or "0", 16)


def _checksum(data: bytes) -> int:
    return len(data) << 32 | zlib.crc32(data)


class OffsetTable:
    """The records of an attempt, by rank. One that is not there is empty; what cannot be written is left out.

    Args:
        folder: Of the attempt.
    """

    def __init__(self, folder: str) -> None:
        # What is sent lies in a folder of its own: who watches the attempt's would be woken by each word of its own.
        self._offset_table = _RecordFile(os.path.join(folder, "tallies"), _OFFSETS_RECORD)
        self._sent = _RecordFile(os.path.join(folder, "sent", "offsets"), _SENT_RECORD)

    def make(self, ranks: list[int]) -> None:
        """Make the files with room for all ranks.

        Raises:
            OSError: There is no space for them.
        """
        self._offset_table.make(ranks)
        self._sent.make(ranks)

    def of(self, rank: int) -> OutputOffsets:
        """Return the record of a rank.

        Raises:
            OSError: It is there and cannot be opened.
        """
        *values, boot = self._offset_table.get(rank)
        offsets = OutputOffsets(*values, *self._sent.get(rank))
        if boot != _boot_number():
            # Nobody who wrote to the file is left, and what a crash made of it is nobody's doing: it counts as it is.
            offsets.size = offsets.sent = offsets.file_start
            offsets.min_allocated = offsets.head_checksum = 0
        return offsets

    def put(self, rank: int, offsets: OutputOffsets) -> None:
        """Write all of a record but `sent`."""
        self._offset_table.put(rank, (*astuple(offsets)[:-1], _boot_number()))

    def write_sent(self, rank: int, end: int) -> None:
        """Write down up to where the output of a rank is handed on."""
        self._sent.put(rank, (end,))

    def close(self) -> None:
        """Give the descriptors back; the next access opens the files anew."""
        self._offset_table.close()
        self._sent.close()


class _RecordFile:
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


_INDEX_RECORD = run_files.INDEX_RECORD
_INDEX_BLOCK = 4096


def find_first_index_byte(fd: int, size: int) -> int:
    """Return the first byte of an index of `size` bytes that is not given up."""
    return 0 if _read_record(fd, 0) else _find_first_record(fd, size, lambda told: told > 0) * _INDEX_RECORD.size


def count_obsolete_index_bytes(fd: int, size: int, first_byte: int) -> int:
    """Return how many bytes at the front of an index tell of nothing but output before `first_byte`, in whole blocks.

    The last record of those stays: it tells when the first byte that there is was written at the earliest.
    """
    records = _find_first_record(fd, size, lambda told: told >= first_byte)
    return max(0, records - 1) * _INDEX_RECORD.size // _INDEX_BLOCK * _INDEX_BLOCK


def _find_first_record(fd: int, size: int, holds: Callable[[int], bool]) -> int:
    low, high = 0, size // _INDEX_RECORD.size
    while low < high:
        middle = (low + high) // 2
        if holds(_read_record(fd, middle)):
            high = middle
        else:
            low = middle + 1
    return low


def _read_record(fd: int, number: int) -> int:
    data = os.pread(fd, _INDEX_RECORD.size, number * _INDEX_RECORD.size)
    return int(_INDEX_RECORD.unpack(data)[0]) if len(data) == _INDEX_RECORD.size else 0


@dataclass(frozen=True)
class OutputPiece:
    """Bytes of an output. Offsets are bytes of the output, not of its file.

    Attributes:
        offset: Where they begin.
        size: How much output there is.
        first_valid: What lies before it is gone.
    """

    offset: int
    data: bytes
    size: int
    first_valid: int


def read_output(
    path: str,
    offset_table: OffsetTable,
    rank: int,
    offset: int,
    length: int,
    *,
    first_valid: int = 0,
    sending: bool = False,
) -> OutputPiece | None:
    """Return what an output holds from `offset` on, or from its first valid byte where that lies behind it.

    Args:
        path: Its file.
        offset_table: Of its attempt.
        rank: Whose.
        offset: Where to begin; below 0 counted from its end.
        length: How many bytes at most.
        first_valid: What the journal says is gone.
        sending: The bytes are for a controller's replica. Up to where they go is written down before they are known
            good, so that whatever follows in a file that is emptied gets offsets behind them.

    Returns:
        `None` where the file was emptied and its supervisor has yet to see that: its bytes have no offset until then.

    Raises:
        OSError: It cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if offset < 0:
            offset = max(0, offset_table.of(rank).file_start + os.fstat(fd).st_size + offset)
        while True:
            offsets = offset_table.of(rank)
            begin = max(offset, offsets.first_valid, first_valid)
            data = os.pread(fd, length, begin - offsets.file_start)
            now, size = _check_output(fd, offset_table, rank)
            if size is not None and sending and begin + len(data) > now.sent and _has_same_start(offsets, now):
                offset_table.write_sent(rank, begin + len(data))
                now, size = _check_output(fd, offset_table, rank)
            if size is None:
                return None
            if _has_same_start(offsets, now):
                return OutputPiece(begin, data, size, max(offsets.first_valid, first_valid))
    finally:
        os.close(fd)


def read_growing_file(path: str, name: str, offset: int, length: int) -> OutputPiece:
    """Return what a file holds that only grows; offsets are as for `read`.

    Args:
        path: The file.
        name: What it is to the run: it says which of its front is gone, if any.
        offset: Where to begin.
        length: How many bytes at most.

    Raises:
        OSError: It cannot be opened.
    """
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        start = offset if offset >= 0 else max(0, size + offset)
        while True:
            first = _find_first_valid(name, fd, size)
            begin = max(start, first)
            data = os.pread(fd, length, begin)
            size = os.fstat(fd).st_size
            # What of the samples is gone follows from the size, which grows before anything goes.
            if _find_first_valid(name, fd, size) <= begin:
                return OutputPiece(begin, data, size, first)


def _find_first_valid(name: str, fd: int, size: int) -> int:
    if name == run_files.SAMPLES_FILE:
        return run_files.find_first_kept_byte(size, run_files.MAX_SAMPLES_BYTES)
    return find_first_index_byte(fd, size) if name.endswith(run_files.INDEX_SUFFIX) else 0


def _check_output(fd: int, offset_table: OffsetTable, rank: int) -> tuple[OutputOffsets, int | None]:
    """Return what is known of an output now, and how long it is; `None` where its file was emptied."""
    status = os.fstat(fd)
    # Asked after the file: what is given up, and what begins anew, stands there before it is done.
    now = offset_table.of(rank)
    emptied = now.is_emptied(status, lambda count: os.pread(fd, count, 0))
    return now, None if emptied else now.file_start + status.st_size


def _has_same_start(before: OutputOffsets, now: OutputOffsets) -> bool:
    return (before.file_start, before.first_valid) == (now.file_start, now.first_valid)
