"""The workers' output files on this node, with reserved space and a time index. If space is short, output is discarded.

A `print` on a full disk would end a rank. To prevent this, the supervisor discards stored output: first bytes that the
head has, then the oldest bytes. The supervisor writes the offsets before it discards bytes, so that readers do not
mistake holes for output. At intervals, and at the end of the attempt, the supervisor records discarded bytes in the
journal.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING, Callable, NamedTuple

from clusterctl.agent.linux import syscalls
from clusterctl.agent.node_state import output_reading
from clusterctl.agent.node_state.output_reading import OffsetTable
from clusterctl.agent.protocol import events, run_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from clusterctl.agent.node_state.run_dir import RunDir


BLOCK_BYTES = 4096
TAIL_BYTES = 64 * 1024
"""The last bytes that the head has, up to this number, are never discarded: a new controller compares them."""
_INDEX_RESERVE = 64 * 1024
_INDEX_BYTES, _INDEX_SECONDS = 4096, 1.0
"""The supervisor appends an index record after this many new bytes, or after this many seconds."""


class WorkerOutput:
    """The output file of a worker. The file is open only during the attempt of the worker (`OpenWorkerOutput`).

    Args:
        run: The run.
        attempt: Number of the attempt.
        rank: The rank.
        offset_table: The offset table of the attempt, if the caller keeps it open; by default each access opens the
            table.

    Attributes:
        offsets: The offsets of this output, as in the offset table.
        fd: Descriptor of the file, which the worker inherits, or -1.
        drop_reason: Reason for the last discard of bytes.
        journalled_at: Monotonic time of the last journal event about this output.
    """

    def __init__(self, run: RunDir, attempt: int, rank: int, offset_table: OffsetTable | None = None) -> None:
        self.attempt, self.rank = attempt, rank
        self.path = run.rank_file(attempt, rank, "log")
        self._index_path = run.rank_file(attempt, rank, "idx")
        self._index_discardable = 0
        self._offset_table = offset_table or OffsetTable(run.attempt_dir(attempt))
        self._shared = offset_table is not None
        self.offsets = self._offset_table.read_offsets(rank)
        self.fd = -1
        self.drop_reason = ""
        self.journalled_at = float("-inf")
        if offset_table is None:
            self._offset_table.close()
            with contextlib.suppress(OSError):
                self.offsets.size = max(self.offsets.size, self.offsets.file_start + os.stat(self.path).st_size)

    @property
    def remaining_bytes(self) -> int:
        """Number of bytes in the file that are not discarded."""
        return self.offsets.size - self.offsets.first_valid

    def write_offsets(self) -> None:
        """Write the offsets of this output to the offset table."""
        self._offset_table.write_offsets(self.rank, self.offsets)
        if not self._shared:
            self._offset_table.close()

    def record_replicated(self, offset: int) -> None:
        """Record that the head has the output up to `offset`."""
        size = self.offsets.size if self.fd < 0 else self.offsets.file_start + os.fstat(self.fd).st_size
        self.offsets.replicated = max(self.offsets.replicated, min(offset, size))
        self.write_offsets()

    def record_replicated_index(self, offset: int) -> None:
        """Record that the head has the time index up to `offset`; discard index records about discarded output."""
        discardable = _round_down(offset - TAIL_BYTES)
        if discardable <= self._index_discardable or not self.offsets.first_valid:
            return
        self._index_discardable = discardable
        with contextlib.suppress(OSError):
            fd = os.open(self._index_path, os.O_RDWR | os.O_CLOEXEC)
            try:
                obsolete = output_reading.count_obsolete_index_bytes(fd, os.fstat(fd).st_size, self.offsets.first_valid)
                if obsolete:
                    syscalls.punch_hole(fd, 0, min(discardable, obsolete))
            finally:
                os.close(fd)

    def discard_front(self, target: int, reason: str) -> int:
        """Discard the output before the offset `target`, in whole blocks; return the number of freed bytes."""
        offsets = self.offsets
        before, after = offsets.first_valid - offsets.file_start, _round_down(target - offsets.file_start)
        if after <= before:
            return 0
        offsets.lost += max(0, offsets.file_start + after - max(offsets.first_valid, offsets.replicated))
        offsets.first_valid, self.drop_reason = offsets.file_start + after, reason
        # Write the offsets before the hole is made, because readers check the offsets again after each read.
        self.write_offsets()
        with contextlib.suppress(OSError), self._writable() as fd:
            if syscalls.punch_hole(fd, _round_down(before), after - _round_down(before)):
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


class OutputGrowth(NamedTuple):
    """The growth of an output file since the last update, and whether its worker has truncated the file."""

    size_bytes: int
    emptied: bool


class OpenWorkerOutput(WorkerOutput):
    """The open output file and time index of a worker of the present attempt.

    Args:
        run, attempt, rank, offset_table: See `WorkerOutput`.
        reserve: Bytes to reserve beyond the end of the output.

    Raises:
        OSError: A file cannot be made or opened.
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

    def update_offsets(self) -> OutputGrowth:
        """Update the offsets from the size of the output file."""
        offsets, file_size = self.offsets, os.fstat(self.fd).st_size
        offsets.sent = self._offset_table.read_sent(self.rank)
        before, emptied = offsets.size, offsets.is_emptied(file_size)
        if emptied:
            self._start_after_truncation()
        offsets.size = offsets.file_start + file_size
        if offsets.size != before or emptied:
            self.write_offsets()
        return OutputGrowth(offsets.size - before, emptied)

    def _start_after_truncation(self) -> None:
        """Set the offset at which new output starts, because the worker has truncated the file.

        The new offset is larger than the offsets of all bytes that may have been sent.
        """
        offsets = self.offsets
        sent_end = max(offsets.sent, offsets.replicated, offsets.first_valid)
        end, lost = max(offsets.size, sent_end), max(0, offsets.size - sent_end)
        # If bytes are lost, leave a gap of at least a page, so that a reader of the replica sees the loss.
        offsets.file_start = offsets.first_valid = _round_down(end + 2 * BLOCK_BYTES - 1) if lost else end
        offsets.lost += lost
        self._reserved, self.drop_reason = 0, "its worker emptied the file"

    # --- the index

    def _open_index(self) -> None:
        record = run_files.INDEX_RECORD
        self._index_size = os.fstat(self._index).st_size // record.size * record.size
        os.ftruncate(self._index, self._index_size)
        self._index_reserved = self._index_size
        last = os.pread(self._index, record.size, max(0, self._index_size - record.size))
        self._indexed, self._indexed_at = int(record.unpack(last)[0]) if last else 0, float("-inf")

    def append_index_record(self, *, last: bool = False) -> None:
        """Append an index record if there is enough new output; with `last`, any new output is enough."""
        new, now = self.offsets.size - self._indexed, time.monotonic()
        if not new or not (last or new >= _INDEX_BYTES or now - self._indexed_at >= _INDEX_SECONDS):
            return
        record = run_files.INDEX_RECORD.pack(self.offsets.size, time.time())
        try:
            syscalls.write_all(self._index, record)
            self._index_size += len(record)
            self._indexed, self._indexed_at = self.offsets.size, now
            self._extend_index_reserve()
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._index, self._index_size)

    def _extend_index_reserve(self) -> None:
        if self._index_reserved - self._index_size < _INDEX_RESERVE // 2:
            syscalls.reserve_blocks(self._index, self._index_size, _INDEX_RESERVE)
            self._index_reserved = self._index_size + _INDEX_RESERVE

    # --- space

    @property
    def missing_reserve_bytes(self) -> int:
        """Number of bytes that are missing in the reserve, or 0 if more than half of the reserve is left."""
        size = os.fstat(self.fd).st_size
        if self._reserved - size > self._reserve // 2 or not self._reserve:
            return 0
        return size + self._reserve - max(self._reserved, size)

    def extend_reserve(self) -> None:
        """Reserve space beyond the end of the output and of its index.

        Raises:
            OSError: The disk has no space for the output.
        """
        size = os.fstat(self.fd).st_size
        if self._reserve and syscalls.reserve_blocks(self.fd, size, self._reserve):
            self._reserved = size + self._reserve
        with contextlib.suppress(OSError):
            self._extend_index_reserve()

    def release_reserve(self) -> None:
        """Release the reserved space of the index."""
        if self._index_reserved > self._index_size:
            with contextlib.suppress(OSError):
                os.ftruncate(self._index, self._index_size)
            self._index_reserved = self._index_size

    def close(self) -> None:
        """Release the reserved disk space and close the files."""
        with contextlib.suppress(OSError):
            # Truncate to the present size, which frees the blocks beyond the end. A process that escaped the sweep may
            # still write, so read the size right before the truncation.
            for fd in (self.fd, self._index):
                os.ftruncate(fd, os.fstat(fd).st_size)
        os.close(self.fd)
        os.close(self._index)


def _round_down(value: int) -> int:
    return value // BLOCK_BYTES * BLOCK_BYTES


_STEP_BYTES = 1 << 20
_FAST_GROWTH_DIVISOR = 8
"""If an output grows by more than 1/8 of its reserve between two updates, the reserves are extended more often."""
_JOURNAL_EVERY_BYTES, _JOURNAL_EVERY_S = 64 << 20, 60.0
"""The supervisor records discarded output after this many bytes, or after this many seconds if bytes were lost."""
_FULL, _LIMIT = "disk full", "logs.max_size"
_LOG = re.compile(r"rank-(\d+)\.log")


class WorkerOutputs:
    """The output files of the present attempt and of earlier attempts.

    Args:
        run: The run.
        attempt: Number of the attempt.
        reserve: Bytes to reserve beyond the end of each file.
        max_size: Size limit of each file in bytes: above it, replicated bytes are discarded. `None` for no limit.
        record: Writes an event to the journal.
        journalled: First valid byte and lost bytes of each output, as in the journal (`JournalState.dropped`).
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        reserve: int,
        max_size: int | None,
        record: Callable[[events.Event], object],
        journalled: Mapping[tuple[int, int], tuple[int, int]],
    ) -> None:
        self._run, self._attempt = run, attempt
        self._reserve, self._max_size = reserve, max_size
        self._record, self._journalled = record, journalled
        self._offset_table = OffsetTable(run.attempt_dir(attempt))
        self._files: dict[int, OpenWorkerOutput] = {}
        self._earlier: dict[tuple[int, int], WorkerOutput] = {}
        self._has_listed_earlier = False
        self._alarmed: set[str] = set()

    # --- the files of the attempt

    def make_files(self, ranks: Iterable[int]) -> None:
        """Make or open the files of these ranks and reserve space.

        Raises:
            OSError: The disk has no space, or a file is not writable.
        """
        rank_list = list(ranks)
        self._offset_table.make(rank_list)
        for rank in rank_list:
            self.open_file(rank)

    def open_file(self, rank: int) -> None:
        """Make or open the files of a rank and reserve space.

        Raises:
            OSError: The disk has no space, or a file is not writable.
        """
        output = self._files[rank] = OpenWorkerOutput(self._run, self._attempt, rank, self._offset_table, self._reserve)
        output.offsets.first_valid = max(output.offsets.first_valid, self._get_recorded_discards(output)[0])
        self._update_output(output)
        output.extend_reserve()

    def __contains__(self, rank: int) -> bool:
        """Whether the files of a rank are open."""
        return rank in self._files

    def get_descriptor(self, rank: int) -> int:
        """Return the descriptor of the output file of a rank."""
        return self._files[rank].fd

    def update_files(self) -> bool:
        """Update offsets, index and reserve of all files, and enforce the size limit; called every 250 ms.

        Returns:
            Whether an output grows so fast that the caller should call `extend_reserves` before the next update.
        """
        fast = False
        for output in self._files.values():
            grown = self._update_output(output)
            fast = fast or grown * _FAST_GROWTH_DIVISOR > self._reserve > 0
            self._extend_short_reserve(output)
            output.append_index_record()
            if self._max_size is not None:
                self._enforce_size_limit(output, self._max_size)
            self._record_discarded(output)
        return fast

    def _update_output(self, output: OpenWorkerOutput) -> int:
        growth = output.update_offsets()
        if growth.emptied:
            self._alarm(
                "output_emptied",
                f"rank {output.rank} has emptied its own output, as `> /dev/stderr` and `open('/dev/stdout', 'w')` do:"
                " output that had not been sent is lost; use `>&2`, `>> /dev/stderr` or mode 'a' instead",
                output.rank,
            )
        return growth.size_bytes

    def extend_reserves(self) -> None:
        """Extend all reserves that are too small."""
        for output in self._files.values():
            self._extend_short_reserve(output)

    def release_reserve(self, rank: int) -> None:
        """Release the reserved index space of a rank, so that its waiter can write the exit file on a full disk."""
        if rank in self._files:
            self._files[rank].release_reserve()

    def close(self) -> None:
        """Update the offsets a last time, release the reserves and close all files."""
        for output in self._files.values():
            with contextlib.suppress(OSError):
                self._update_output(output)
            output.append_index_record(last=True)
            self._record_discarded(output, last=True)
            output.close()
        self._files.clear()
        self._offset_table.close()

    # --- space

    def _extend_short_reserve(self, output: OpenWorkerOutput) -> None:
        missing = output.missing_reserve_bytes
        if not missing:
            return
        try:
            output.extend_reserve()
        except OSError:
            self._make_room(missing + _STEP_BYTES)
            with contextlib.suppress(OSError):
                output.extend_reserve()

    def _make_room(self, need: int) -> None:
        """Free at least `need` bytes if possible."""
        self._alarm("disk_full", "the disk is full: the oldest output is discarded, first the part that the head has")
        earlier = self._list_earlier_outputs()
        replicated = [(output, output.offsets.replicated) for output in (*earlier, *self._files.values())]
        for output, end in (*replicated, *((output, output.offsets.size) for output in earlier)):
            if need > 0:
                need -= self._discard_front(output, min(end - TAIL_BYTES, output.offsets.first_valid + need), _FULL)
        while need > 0:
            largest = max(self._files.values(), key=lambda each: each.remaining_bytes)
            target = largest.offsets.first_valid + max(need, _STEP_BYTES)
            freed = self._discard_front(largest, min(largest.offsets.size - TAIL_BYTES, target), _FULL)
            if freed <= 0:
                return
            need -= freed

    def _enforce_size_limit(self, output: WorkerOutput, limit: int) -> None:
        target = min(output.offsets.size - limit, output.offsets.replicated - TAIL_BYTES)
        if target - output.offsets.first_valid >= max(BLOCK_BYTES, min(_STEP_BYTES, limit)):
            self._discard_front(output, target, _LIMIT)

    def _discard_front(self, output: WorkerOutput, target: int, reason: str) -> int:
        freed = output.discard_front(target, reason)
        self._record_discarded(output)
        return freed

    # --- replicated output, and earlier attempts

    def record_replicated_file(self, name: str, offset: int) -> None:
        """Record that the head has a file of the run up to `offset`; ignore files that are no output or index."""
        output = run_files.parse_attempt_and_rank(name)
        index = run_files.parse_attempt_and_rank(name, run_files.format_index_path)
        if output is not None:
            self.record_replicated(*output, offset)
        elif index is not None:
            self.record_replicated_index(*index, offset)

    def record_replicated(self, attempt: int, rank: int, offset: int) -> None:
        """Record that the head has an output up to `offset`; with a size limit, discard it if the attempt has ended."""
        output = self._get_output(attempt, rank)
        output.record_replicated(offset)
        if output.fd < 0 and self._max_size is not None:
            self._enforce_size_limit(output, 0)
            self._record_discarded(output, last=output.offsets.replicated >= output.offsets.size)

    def record_replicated_index(self, attempt: int, rank: int, offset: int) -> None:
        """Record that the head has the time index of a rank up to `offset`."""
        self._get_output(attempt, rank).record_replicated_index(offset)

    def _get_output(self, attempt: int, rank: int) -> WorkerOutput:
        if attempt == self._attempt and rank in self._files:
            return self._files[rank]
        earlier = self._earlier.get((attempt, rank))
        if earlier is None:
            earlier = self._earlier[attempt, rank] = WorkerOutput(self._run, attempt, rank)
        return earlier

    def _list_earlier_outputs(self) -> list[WorkerOutput]:
        """Return the outputs of earlier attempts that still have bytes to discard, oldest first."""
        if not self._has_listed_earlier:
            with contextlib.suppress(OSError):
                for attempt in range(self._attempt):
                    folder = self._run.attempt_dir(attempt)
                    for name in os.listdir(folder) if os.path.isdir(folder) else ():
                        if match := _LOG.fullmatch(name):
                            self._get_output(attempt, int(match[1]))
                self._has_listed_earlier = True
        return sorted(
            (o for o in self._earlier.values() if o.remaining_bytes > TAIL_BYTES), key=lambda o: (o.attempt, o.rank)
        )

    # --- events

    def _get_recorded_discards(self, output: WorkerOutput) -> tuple[int, int]:
        return self._journalled.get((output.attempt, output.rank), (0, 0))

    def _record_discarded(self, output: WorkerOutput, *, last: bool = False) -> None:
        """Record discarded output in the journal, but not each discard, to keep the journal of a long run small."""
        first_valid, lost = self._get_recorded_discards(output)
        gone, lost, now = output.offsets.first_valid - first_valid, output.offsets.lost - lost, time.monotonic()
        if not gone and not lost:
            return
        late = now - output.journalled_at >= _JOURNAL_EVERY_S and (lost > 0 or output.drop_reason != _LIMIT)
        if last or late or gone >= _JOURNAL_EVERY_BYTES:
            output.journalled_at = now
            self._record(
                events.OutputDropped(output.attempt, output.rank, output.offsets.first_valid, lost, output.drop_reason)
            )

    def _alarm(self, code: str, message: str, rank: int | None = None) -> None:
        if code not in self._alarmed:
            self._alarmed.add(code)
            self._record(events.Alarm(self._attempt, code, message, rank=rank))
