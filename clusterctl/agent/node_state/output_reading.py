"""Offsets of each worker's output, and readers of output files and time indices.

A byte of output keeps its offset forever, although the start of the file may change. The supervisor discards the front
of a file if space is short. A worker that opens `/dev/stderr` with O_TRUNC empties its own output. The field
`file_start` is then the offset of the first byte of the file. The offset records are overwritten in place, which works
on a full disk.

The supervisor writes all fields except `sent`. The session that sends the output writes `sent`.

The front of a time index is discarded together with the output that it describes. Otherwise the index, 16 B per second,
would become large in a long run. The discarded part reads as zeros. No index record consists of zeros, so the file
itself shows where the index starts.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.linux import proc, syscalls
from clusterctl.agent.protocol import run_files

if TYPE_CHECKING:
    from typing import Callable


_OFFSETS_RECORD, _SENT_RECORD = struct.Struct("<6Q16x"), struct.Struct("<2Q")
"""The sizes of the records divide the page size. A record never spans two pages, so a write of a record is atomic."""


@dataclass
class OutputOffsets:
    """Offsets of one output, which count bytes of the whole output and not of its present file.

    Attributes:
        file_start: Offset of the first byte of the present file.
        first_valid: Offset of the first byte that was not discarded; at least `file_start`.
        size: Size of the whole output at the last update.
        lost: Number of discarded bytes that no head has.
        replicated: Offset up to which the head has the output.
        sent: Offset up to which a session has sent the output.
    """

    file_start: int = 0
    first_valid: int = 0
    size: int = 0
    lost: int = 0
    replicated: int = 0
    sent: int = 0

    def is_emptied(self, file_size: int) -> bool:
        """Return whether the file is smaller than before, which shows that the worker has truncated the file."""
        return self.file_start + file_size < max(self.size, self.sent)


def _read_boot_number() -> int:
    return int(proc.read_boot_id().replace("-", "")[:15] or "0", 16)


class OffsetTable:
    """The files with the offsets of all outputs of an attempt, by rank. Failed writes are ignored.

    Args:
        folder: Folder of the attempt.
    """

    def __init__(self, folder: str) -> None:
        # `sent` has its own folder, because sessions watch the folder of the attempt and would notice their own writes.
        self._offset_table = _RecordFile(os.path.join(folder, "offsets"), _OFFSETS_RECORD)
        self._sent = _RecordFile(os.path.join(folder, "sent", "offsets"), _SENT_RECORD)

    def make(self, ranks: list[int]) -> None:
        """Make the files, and reserve space for the records of these ranks.

        Raises:
            OSError: The disk is full.
        """
        self._offset_table.make(ranks)
        self._sent.make(ranks)

    def read_offsets(self, rank: int) -> OutputOffsets:
        """Return the offsets of a rank; all are 0 if the files or the record do not exist.

        Raises:
            OSError: A file exists and cannot be opened.
        """
        *values, boot = self._offset_table.get(rank)
        offsets = OutputOffsets(*values)
        offsets.sent = self.read_sent(rank)
        if boot != _read_boot_number():
            # After a reboot no process writes to the file any more, so its present size is its final size.
            offsets.size = offsets.file_start
        return offsets

    def read_sent(self, rank: int) -> int:
        """Return the offset up to which sessions have sent the output of a rank since the last boot."""
        end, boot = self._sent.get(rank)
        return end if boot == _read_boot_number() else 0

    def write_offsets(self, rank: int, offsets: OutputOffsets) -> None:
        """Write the offsets of a rank, except `sent`."""
        self._offset_table.put(rank, (*astuple(offsets)[:-1], _read_boot_number()))

    def write_sent(self, rank: int, end: int) -> None:
        """Record that a session has sent the output of a rank up to the offset `end`."""
        self._sent.put(rank, (end, _read_boot_number()))

    def close(self) -> None:
        """Close the files; the next access opens them again."""
        self._offset_table.close()
        self._sent.close()


class _RecordFile:
    """A file of fixed-size records, one per rank."""

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
        # A write may be in progress. If two reads are equal, the record is complete.
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
    """Return the offset of the first record of a time index that was not discarded; `size` is the size of the file."""
    return 0 if _read_record(fd, 0) else _find_first_record(fd, size, lambda size_at: size_at > 0) * _INDEX_RECORD.size


def count_obsolete_index_bytes(fd: int, size: int, first_byte: int) -> int:
    """Return how many bytes at the start of a time index describe only output before `first_byte`, in whole blocks.

    The last record before `first_byte` is not counted, because its time is the earliest possible time of `first_byte`.
    """
    records = _find_first_record(fd, size, lambda size_at: size_at >= first_byte)
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
    """A piece of an output, with offsets that count bytes of the whole output and not of its present file.

    Attributes:
        offset: Offset of the first byte of `data`.
        size: Size of the whole output.
        first_valid: Offset of the first byte that was not discarded.
    """

    offset: int
    data: bytes
    size: int
    first_valid: int


def read_output(
    path: str, offset_table: OffsetTable, rank: int, offset: int, length: int, *, sending: bool = False
) -> OutputPiece | None:
    """Return a piece of an output that starts at `offset`, or at the first valid byte if `offset` is before it.

    Args:
        path: The output file.
        offset_table: Offsets of the attempt.
        rank: The rank of the output.
        offset: Start of the piece; a negative offset counts from the end.
        length: Maximum number of bytes.
        sending: Whether the caller sends the piece to a controller. If true, this function writes `sent` before its
            final check. If the worker then empties the file, the new output gets offsets after the piece.

    Returns:
        The piece; `None` if the worker has emptied the file and the supervisor has not yet updated the offsets.

    Raises:
        OSError: The file cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if offset < 0:
            offset = max(0, offset_table.read_offsets(rank).file_start + os.fstat(fd).st_size + offset)
        while True:
            offsets = offset_table.read_offsets(rank)
            begin = max(offset, offsets.first_valid)
            data = os.pread(fd, length, begin - offsets.file_start)
            now, size = _read_offsets_and_size(fd, offset_table, rank)
            if size is not None and sending and begin + len(data) > now.sent and _has_same_start(offsets, now):
                offset_table.write_sent(rank, begin + len(data))
                now, size = _read_offsets_and_size(fd, offset_table, rank)
            if size is None:
                return None
            if _has_same_start(offsets, now):
                return OutputPiece(begin, data, size, offsets.first_valid)
    finally:
        os.close(fd)


def read_growing_file(path: str, name: str, offset: int, length: int) -> OutputPiece:
    """Return a piece of a file that only grows, except that the front of samples and time indices may be discarded.

    Args:
        path: The file.
        name: Name of the file in the run.
        offset: Start of the piece.
        length: Maximum number of bytes.

    Raises:
        OSError: The file cannot be opened.
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
            # The size of the samples file determines how much of the front is discarded. The file grows before the
            # front is discarded.
            if _find_first_valid(name, fd, size) <= begin:
                return OutputPiece(begin, data, size, first)


def _find_first_valid(name: str, fd: int, size: int) -> int:
    if name == run_files.SAMPLES_FILE:
        return run_files.find_first_kept_byte(size, run_files.MAX_SAMPLES_BYTES)
    return find_first_index_byte(fd, size) if name.endswith(run_files.INDEX_SUFFIX) else 0


def _read_offsets_and_size(fd: int, offset_table: OffsetTable, rank: int) -> tuple[OutputOffsets, int | None]:
    """Return the offsets and the size of an output; the size is `None` if the worker has emptied the file."""
    size = os.fstat(fd).st_size
    # Read the record after the file size: the supervisor writes the record before it changes the file.
    now = offset_table.read_offsets(rank)
    return now, None if now.is_emptied(size) else now.file_start + size


def _has_same_start(before: OutputOffsets, now: OutputOffsets) -> bool:
    return (before.file_start, before.first_valid) == (now.file_start, now.first_valid)
