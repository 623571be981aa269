"""The time index of an output file: when had it which size.

The node's supervisor looks four times a second and appends a record where the file has grown by 4 KiB or more, or at
all after a second without one. A line that ends at byte `n` gets the time of the first record of at least that size, so
it is never dated before it was written.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from clusterctl.agent.protocol.files import INDEX_RECORD

if TYPE_CHECKING:
    from collections.abc import Callable

_LATEST = 1e11
"""Seconds since the epoch that no calendar of ours has."""
_BLOCK_RECORDS = 4096


class Mark(NamedTuple):
    """At wall clock `time` (seconds) the file had `size` bytes."""

    size: int
    time: float


class TimeIndex:
    """Looks records up in the file as it is now; keeps one block of them, whatever the length of the run.

    A missing file is an empty index; a torn last record is left out until it is whole.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._block = b""
        self._block_start = 0

    def last(self) -> Mark | None:
        """Return the newest record."""
        count = self._count()
        return self._record(count - 1) if count else None

    def position_of_size(self, size: int) -> int:
        """Return the number of the first record with at least `size` bytes (the number of records if there is none)."""
        return self._bisect(lambda mark: mark.size >= size)

    def size_before(self, time: float) -> int:
        """Return the size that the file surely had before `time`; what lies beyond it is from `time` on."""
        position = self._bisect(lambda mark: mark.time >= time)
        return self._record(position - 1).size if position else 0

    def size_until(self, time: float) -> int | None:
        """Return the size up to which all was written until `time`, or `None` where nothing is known to be later."""
        position = self._bisect(lambda mark: mark.time > time)
        if position == self._count():
            return None
        return self._record(position - 1).size if position else 0

    def get(self, position: int) -> Mark | None:
        """Return a record by its number, or `None` where there is none yet."""
        mark = self._held(position)
        if mark is None:
            self._load(position)
            mark = self._held(position)
        return mark

    def _record(self, position: int) -> Mark:
        mark = self.get(position)
        return Mark(0, 0.0) if mark is None else mark

    def _bisect(self, holds: Callable[[Mark], bool]) -> int:
        low, high = 0, self._count()
        while low < high:
            middle = (low + high) // 2
            if holds(self._peek(middle)):
                high = middle
            else:
                low = middle + 1
        return low

    def _peek(self, position: int) -> Mark:
        mark = self._held(position)
        if mark is None:
            self._load(max(0, position - _BLOCK_RECORDS // 2))
            return self._record(position)
        return mark

    def _held(self, position: int) -> Mark | None:
        """Return a record of the block; records are taken apart when they are asked for, for mostly few are."""
        place = (position - self._block_start) * INDEX_RECORD.size
        if not 0 <= place <= len(self._block) - INDEX_RECORD.size:
            return None
        size, time = INDEX_RECORD.unpack_from(self._block, place)
        # A node may have written anything: what is no moment is before all others.
        return Mark(size, time if abs(time) < _LATEST else 0.0)

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
