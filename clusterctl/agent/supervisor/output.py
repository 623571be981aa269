"""One worker's output on this node: its file, its time index, its tally."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from clusterctl.agent.linux import syscalls
from clusterctl.agent.node_state import output_offsets
from clusterctl.agent.node_state.output_offsets import UNKNOWN_MIN_ALLOCATED, OffsetTable
from clusterctl.agent.protocol import run_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.agent.node_state.run_dir import RunDir

BLOCK = 4096
TAIL = 64 * 1024
"""Bytes at the end of what is replicated of a file that stay, so that a new controller can compare them."""
_INDEX_RESERVE = 64 * 1024
_INDEX_BYTES, _INDEX_SECONDS = 4096, 1.0
"""An index tells of so much that is new at once, of less after so long."""
_FLOOR = 4
"""Of what is allocated, this part of the reserve may come and go without anybody having emptied a file."""


class Output:
    """An output. While its attempt goes on it is an `OpenOutput`; after that nothing of it is open.

    Args:
        run: Whose.
        attempt: Of which attempt.
        rank: Of which rank.
        tallies: The tallies of the attempt, kept open by the caller; by default they are opened for each access.

    Attributes:
        tally: What is known of it, as it stands in the file of tallies.
        fd: What the worker writes to, or -1.
        why: Why it lost its front last.
        told_at: When the journal was told of that, monotonic.
    """

    def __init__(self, run: RunDir, attempt: int, rank: int, offset_table: OffsetTable | None = None) -> None:
        self.attempt, self.rank = attempt, rank
        self.path = run.of_rank(attempt, rank, "log")
        self._index_path = run.of_rank(attempt, rank, "idx")
        self._index_safe = 0
        self._offset_table = offset_table or OffsetTable(run.attempt(attempt))
        self._shared = offset_table is not None
        self.offsets = self._offset_table.of(rank)
        self.fd = -1
        self.why = ""
        self.told_at = float("-inf")
        if offset_table is None:
            self._offset_table.close()
            with contextlib.suppress(OSError):
                self.offsets.size = max(self.offsets.size, self.offsets.file_start + os.stat(self.path).st_size)

    @property
    def held(self) -> int:
        """Bytes that are still there."""
        return self.offsets.size - self.offsets.first_valid

    def put(self) -> None:
        """Write the tally down."""
        self._offset_table.put(self.rank, self.offsets)
        if not self._shared:
            self._offset_table.close()

    def replicated(self, offset: int) -> None:
        """Take note of what is safe on the head."""
        size = self.offsets.size if self.fd < 0 else self.offsets.file_start + os.fstat(self.fd).st_size
        self.offsets.replicated = max(self.offsets.replicated, min(offset, size))
        self.put()

    def index_replicated(self, offset: int) -> None:
        """Take note of what of the time index is safe on the head; what of it tells of no byte here is given up."""
        safe = _down(offset - TAIL)
        if safe <= self._index_safe or not self.offsets.first_valid:
            return
        self._index_safe = safe
        with contextlib.suppress(OSError):
            fd = os.open(self._index_path, os.O_RDWR | os.O_CLOEXEC)
            try:
                useless = output_offsets.count_obsolete_index_bytes(fd, os.fstat(fd).st_size, self.offsets.first_valid)
                if useless:
                    syscalls.punch_hole(fd, 0, min(safe, useless))
            finally:
                os.close(fd)

    def cut(self, target: int, why: str) -> int:
        """Give up what lies before `target`, in whole blocks; return how many bytes that frees."""
        offsets = self.offsets
        before, after = offsets.first_valid - offsets.file_start, _down(target - offsets.file_start)
        if after <= before:
            return 0
        offsets.lost += max(0, offsets.file_start + after - max(offsets.first_valid, offsets.replicated))
        offsets.first_valid, offsets.head_checksum, self.why = offsets.file_start + after, 0, why
        offsets.min_allocated = max(0, offsets.min_allocated - (after - _down(before)))
        # Before it is done: whoever reads looks here again after the read.
        self.put()
        with contextlib.suppress(OSError), self._writable() as fd:
            if syscalls.punch_hole(fd, _down(before), after - _down(before)):
                return after - before
        return 0

    @contextlib.contextmanager
    def _writable(self) -> Iterator[int]:
        fd = self.fd if self.fd >= 0 else os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            if fd != self.fd:
                os.close(fd)


class OpenOutput(Output):
    """The output of an attempt that goes on.

    Args:
        run, attempt, rank, tallies: See `Output`.
        reserve: Bytes to reserve beyond the end.

    Raises:
        OSError: The files cannot be made.
    """

    def __init__(self, run: RunDir, attempt: int, rank: int, offset_table: OffsetTable, reserve: int) -> None:
        super().__init__(run, attempt, rank, offset_table)
        self._reserve = reserve
        flags = os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self.fd = os.open(self.path, flags | os.O_WRONLY, 0o600)
        try:
            self._index = os.open(self._index_path, flags | os.O_RDWR, 0o600)
        except OSError:
            os.close(self.fd)
            raise
        self._reserved = 0
        self._open_index()

    def look(self) -> tuple[int, bool]:
        """See what the file has become; return by how much it has grown, and whether somebody has emptied it."""
        offsets, status = self.offsets, os.fstat(self.fd)
        if not offsets.min_allocated:
            offsets.sent = self._offset_table.of(self.rank).sent
        before, emptied = offsets.size, offsets.is_emptied(status, self._first)
        if emptied:
            self._begin_anew()
            self._reserve_anew()
            status = os.fstat(self.fd)
        offsets.size = offsets.file_start + status.st_size
        if offsets.update_head_checksum(self._first) or offsets.size != before or emptied:
            self.put()
        return offsets.size - before, emptied

    @property
    def is_emptied(self) -> bool:
        """Somebody has emptied the file, which the next look will take note of."""
        return self.offsets.is_emptied(os.fstat(self.fd), self._first)

    def _first(self, count: int) -> bytes:
        # The worker's own descriptor is for writing alone.
        return syscalls.read_bytes(self.path, count)

    def _begin_anew(self) -> None:
        """Begin a new part, behind all that anybody may have been sent."""
        offsets = self.offsets
        handed = max(self._offset_table.of(self.rank).sent, offsets.replicated, offsets.first_valid)
        end, lost = max(offsets.size, handed), max(0, offsets.size - handed)
        # A whole page is left open where something is missing, so that a reader of the replica sees that.
        offsets.file_start = offsets.first_valid = _down(end + 2 * BLOCK - 1) if lost else end
        offsets.min_allocated, offsets.head_checksum, offsets.lost = 0, 0, offsets.lost + lost
        self._reserved, self.why = 0, "its worker emptied the file"

    def _reserve_anew(self) -> None:
        """Reserve space for a new part before a reader is given any of it.

        Whoever has seen the worker's output may make it empty the file again and write the same: only what is reserved
        tells that, so until it is there the part counts as emptied.
        """
        self.offsets.size, self.offsets.min_allocated = self.offsets.file_start, UNKNOWN_MIN_ALLOCATED
        self.put()
        self.offsets.min_allocated = 0
        with contextlib.suppress(OSError):
            self.extend()

    # --- the index

    def _open_index(self) -> None:
        record = run_files.INDEX_RECORD
        self._index_size = os.fstat(self._index).st_size // record.size * record.size
        os.ftruncate(self._index, self._index_size)
        self._index_reserved = self._index_size
        last = os.pread(self._index, record.size, max(0, self._index_size - record.size))
        self._indexed, self._indexed_at = int(record.unpack(last)[0]) if last else 0, float("-inf")

    def index(self, *, last: bool = False) -> None:
        """Tell how much there is at this moment, unless that is hardly more than was told before."""
        new, now = self.offsets.size - self._indexed, time.monotonic()
        if not new or not (last or new >= _INDEX_BYTES or now - self._indexed_at >= _INDEX_SECONDS):
            return
        record = run_files.INDEX_RECORD.pack(self.offsets.size, time.time())
        try:
            syscalls.write_all(self._index, record)
            self._index_size += len(record)
            self._indexed, self._indexed_at = self.offsets.size, now
            self._keep_index_reserve()
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._index, self._index_size)

    def _keep_index_reserve(self) -> None:
        if self._index_reserved - self._index_size < _INDEX_RESERVE // 2:
            syscalls.reserve_blocks(self._index, self._index_size, _INDEX_RESERVE)
            self._index_reserved = self._index_size + _INDEX_RESERVE

    # --- space

    @property
    def wanted(self) -> int:
        """Bytes to reserve now; 0 while there is enough."""
        size = os.fstat(self.fd).st_size
        if self._reserved - size > self._reserve // 2 or not self._reserve:
            return 0
        return size + self._reserve - max(self._reserved, size)

    def extend(self) -> None:
        """Reserve space beyond the end, for the index too.

        Raises:
            OSError: There is none.
        """
        size = os.fstat(self.fd).st_size
        if self._reserve and syscalls.reserve_blocks(self.fd, size, self._reserve):
            self._reserved = size + self._reserve
            self._raise_floor(size)
        with contextlib.suppress(OSError):
            self._keep_index_reserve()

    def _raise_floor(self, size: int) -> None:
        allocated = os.fstat(self.fd).st_blocks * 512
        held = size - (self.offsets.first_valid - self.offsets.file_start)
        # Where the filesystem counts what is reserved, that it is gone tells that somebody has emptied the file.
        if allocated - held >= self._reserve // 2:
            self.offsets.min_allocated = max(0, allocated - self._reserve // _FLOOR)
            self.put()

    def make_way(self) -> None:
        """Give back a little space: that beyond the end of the index, which nobody but us writes to."""
        if self._index_reserved > self._index_size:
            with contextlib.suppress(OSError):
                os.ftruncate(self._index, self._index_size)
            self._index_reserved = self._index_size

    def close(self) -> None:
        """Give back the reserve and close the files."""
        self.offsets.min_allocated = 0
        self.put()
        with contextlib.suppress(OSError):
            # Blocks beyond the end are freed by setting the size to what it is. A stray may still write: the size is
            # taken right before, and this is done only when nothing of the attempt is left.
            for fd in (self.fd, self._index):
                os.ftruncate(fd, os.fstat(fd).st_size)
        os.close(self.fd)
        os.close(self._index)


def _down(value: int) -> int:
    return value // BLOCK * BLOCK
