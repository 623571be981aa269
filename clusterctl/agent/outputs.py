"""The output files of an attempt: space reserved beyond their end, a time index, what gives way on a full disk.

A `print` on a full disk would end a rank, so bytes of ours give way first: those that are safe on the head, then the
oldest. What is given up is said before it is done, so that a reader never takes a hole for output.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Callable

from clusterctl.agent import protocol, system

_BLOCK = 4096
_TAIL = 64 * 1024
"""Bytes at the end of what is replicated that stay, so that a new controller can compare them."""
_INDEX_RESERVE = 64 * 1024
_STEP = 1 << 20
_FAST = 8
"""What grows by more than this part of the reserve from one look to the next is looked at more often."""

Drop = Callable[[int, int, int, str], None]
"""Says that the output of a rank before an offset is going: `(rank, first_valid, lost, why)`."""


@dataclass
class Output:
    """One worker's output on this node. All numbers are bytes.

    Attributes:
        size: How long the file was when last seen.
        reserved: Up to where blocks are reserved.
        first_valid: What lies before it is gone.
        replicated: Up to where it is safe on the head.
    """

    rank: int
    fd: int
    index: int
    size: int = 0
    reserved: int = 0
    index_size: int = 0
    index_reserved: int = 0
    first_valid: int = 0
    replicated: int = 0

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.fd)
        os.close(self.index)


def _down(value: int) -> int:
    return value // _BLOCK * _BLOCK


class Outputs:
    """The output files of one attempt."""

    def __init__(self, reserve: int, max_size: int | None, drop: Drop, alarm: Callable[[str], None]) -> None:
        self._reserve, self._max_size = reserve, max_size
        self._drop, self._alarm = drop, alarm
        self._said_full = False
        self._files: dict[int, Output] = {}
        self._ended: dict[int, tuple[str, Output]] = {}
        self._paths: dict[int, str] = {}

    def open(self, rank: int, log: str, index: str, first_valid: int = 0) -> None:
        """Make or open the files of a rank and reserve space.

        Raises:
            OSError: No space, or not writable.
        """
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        idx = os.open(index, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size, index_size = os.fstat(fd).st_size, os.fstat(idx).st_size
        index_size -= index_size % protocol.INDEX_RECORD.size
        os.ftruncate(idx, index_size)
        one = Output(rank, fd, idx, size, size, index_size, index_size, first_valid)
        self._files[rank] = one
        self._paths[rank] = log
        if system.reserve(fd, size, self._reserve):
            one.reserved = size + self._reserve
        with contextlib.suppress(OSError):
            system.reserve(idx, index_size, _INDEX_RESERVE)
            one.index_reserved = index_size + _INDEX_RESERVE

    def descriptor(self, rank: int) -> int:
        """Return the descriptor that a worker writes to."""
        return self._files[rank].fd

    def size(self, rank: int) -> int:
        """Return the size of a rank's output now."""
        return os.fstat(self._files[rank].fd).st_size

    def sizes(self) -> dict[int, int]:
        """Return the size of each rank's output now."""
        return {rank: self.size(rank) for rank in self._files}

    def replicated(self, rank: int, offset: int) -> None:
        """Take note of what is safe on the head."""
        one = self._files.get(rank)
        if one is not None:
            one.replicated = max(one.replicated, min(offset, self.size(rank)))
        elif rank in self._ended and self._max_size is not None:
            self._hold_limit_of_ended(rank, offset, self._max_size)

    def _hold_limit_of_ended(self, rank: int, offset: int, limit: int) -> None:
        path, one = self._ended[rank]
        one.replicated = max(one.replicated, min(offset, one.size))
        try:
            one.fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            self._hold_limit(one, limit)
        finally:
            os.close(one.fd)

    def make_way(self, rank: int) -> None:
        """Give back a little space on a disk that may be full: somebody has to say how the worker of a rank ended.

        It is that beyond the end of its index, which nobody but us writes to.
        """
        one = self._files.get(rank)
        if one is not None and one.index_reserved > one.index_size:
            with contextlib.suppress(OSError):
                os.ftruncate(one.index, one.index_size)
            one.index_reserved = one.index_size

    def look(self) -> bool:
        """See what has grown: write the index, keep the reserve, hold the limit. To be called every 250 ms.

        Returns:
            Whether something grows so fast that the reserve should be looked at earlier (`keep_up`).
        """
        fast = False
        for one in self._files.values():
            size = os.fstat(one.fd).st_size
            if size != one.size:
                fast = fast or (size - one.size) * _FAST > self._reserve > 0
                one.size = size
                self._index(one)
                self._keep_reserve(one)
            if self._max_size is not None and size - one.first_valid > self._max_size:
                self._hold_limit(one, self._max_size)
        return fast

    def keep_up(self) -> None:
        """Keep the reserve ahead of what grows, between two looks."""
        for one in self._files.values():
            self._keep_reserve(one)

    def _index(self, one: Output) -> None:
        record = protocol.INDEX_RECORD.pack(one.size, time.time())
        try:
            system.write_all(one.index, record)
            one.index_size += len(record)
            if one.index_reserved - one.index_size < _INDEX_RESERVE // 2:
                system.reserve(one.index, one.index_size, _INDEX_RESERVE)
                one.index_reserved = one.index_size + _INDEX_RESERVE
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(one.index, one.index_size)

    # --- space

    def _keep_reserve(self, one: Output) -> None:
        size = os.fstat(one.fd).st_size
        if not self._reserve or one.reserved - size > self._reserve // 2:
            return
        wanted = size + self._reserve - max(one.reserved, size)
        try:
            self._extend(one)
        except OSError:
            self._make_room(wanted + _STEP)
            with contextlib.suppress(OSError):
                self._extend(one)

    def _extend(self, one: Output) -> None:
        size = os.fstat(one.fd).st_size
        if system.reserve(one.fd, size, self._reserve):
            one.reserved = size + self._reserve

    def _make_room(self, wanted: int) -> None:
        """Free at least that many bytes, if there are so many to free."""
        if not self._said_full:
            self._said_full = True
            self._alarm("the disk is full: the oldest output gives way, what is already on the head first")
        for one in self._files.values():
            wanted -= self._cut(one, min(one.replicated - _TAIL, one.first_valid + wanted), "disk full")
        while wanted > 0:
            one = max(self._files.values(), key=lambda each: each.size - each.first_valid)
            freed = self._cut(one, min(one.size - _TAIL, one.first_valid + max(wanted, _STEP)), "disk full")
            if freed <= 0:
                return
            wanted -= freed

    def _hold_limit(self, one: Output, limit: int) -> None:
        target = min(one.size - limit, one.replicated - _TAIL)
        if target - one.first_valid >= min(_STEP, limit):
            self._cut(one, target, "logs.max_size")

    def _cut(self, one: Output, target: int, why: str) -> int:
        """Give up a rank's output before `target`; return how many bytes that frees."""
        target = _down(target)
        before = one.first_valid
        if target <= before:
            return 0
        self._drop(one.rank, target, max(0, target - max(before, one.replicated)), why)
        one.first_valid = target
        with contextlib.suppress(OSError):
            if system.punch(one.fd, _down(before), target - _down(before)):
                return target - before
        return 0

    def close(self) -> None:
        """Give back the reserve and close all files."""
        for one in self._files.values():
            with contextlib.suppress(OSError):
                # Blocks beyond the end are freed by setting the size to what it is. A stray may still write: the size
                # is taken right before, and this is done only when nothing of the attempt is left.
                one.size = os.fstat(one.fd).st_size
                os.ftruncate(one.fd, one.size)
            one.close()
            self._ended[one.rank] = (self._paths[one.rank], one)
        self._files.clear()
