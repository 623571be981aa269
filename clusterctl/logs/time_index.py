"""Reads the time index of an output file: the sizes of the file at some times.

The supervisor on the node checks the file four times a second. The supervisor appends a record if the file has grown by
4 KiB, or has grown at all since a record one second ago. A line that ends at byte `n` gets the time of the first record
with a size of at least `n`, so the line was written at this time or earlier.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from clusterctl.agent.protocol.run_files import INDEX_RECORD

_LATEST = 1e11
"""An upper limit of valid times, in seconds since the epoch."""
_BLOCK_RECORDS = 4096


class IndexRecord(NamedTuple):
    """The file had `size` bytes at the wall clock time `time`, in seconds."""

    size: int
    time: float


class TimeIndex:
    """Finds records in an index file. Only one block of the file is in memory.

    A missing file is an empty index. An incomplete last record is ignored.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._block = b""
        self._block_start = 0

    def find_position_of_size(self, size: int) -> int:
        """Return the position of the first record with at least `size` bytes; without one, the number of records."""
        return self._bisect(lambda mark: mark.size >= size)

    def find_size_before(self, time: float) -> int:
        """Return the size of the last record before `time`.

        All bytes beyond this size were written at `time` or later.
        """
        position = self._bisect(lambda mark: mark.time >= time)
        return self._record(position - 1).size if position else 0

    def find_size_until(self, time: float) -> int | None:
        """Return the size of the file at `time`; `None` if no record is later."""
        position = self._bisect(lambda mark: mark.time > time)
        if position == self._count():
            return None
        return self._record(position - 1).size if position else 0

    def get(self, position: int) -> IndexRecord | None:
        """Return the record at a position, or `None` if it does not exist yet."""
        mark = self._get_loaded(position)
        if mark is None:
            self._load(position)
            mark = self._get_loaded(position)
        return mark

    def _record(self, position: int) -> IndexRecord:
        mark = self.get(position)
        return IndexRecord(0, 0.0) if mark is None else mark

    def _bisect(self, holds: Callable[[IndexRecord], bool]) -> int:
        low, high = 0, self._count()
        while low < high:
            middle = (low + high) // 2
            if holds(self._peek(middle)):
                high = middle
            else:
                low = middle + 1
        return low

    def _peek(self, position: int) -> IndexRecord:
        mark = self._get_loaded(position)
        if mark is None:
            self._load(max(0, position - _BLOCK_RECORDS // 2))
            return self._record(position)
        return mark

    def _get_loaded(self, position: int) -> IndexRecord | None:
        """Return a record of the loaded block, or `None` if the block does not contain it."""
        place = (position - self._block_start) * INDEX_RECORD.size
        if not 0 <= place <= len(self._block) - INDEX_RECORD.size:
            return None
        size, time = INDEX_RECORD.unpack_from(self._block, place)
        # The content comes from a node and may be wrong: an invalid time counts as 0.
        return IndexRecord(size, time if abs(time) < _LATEST else 0.0)

    def _count(self) -> int:
        try:
            return os.stat(self._path).st_size // INDEX_RECORD.size
        except FileNotFoundError:
            return 0

    def _load(self, position: int) -> None:
        self._block, self._block_start = b"", position
        try:
            with open(self._path, "rb", buffering=0) as file:
                self._block = os.pread(file.fileno(), _BLOCK_RECORDS * INDEX_RECORD.size, position * INDEX_RECORD.size)
        except FileNotFoundError:
            return
