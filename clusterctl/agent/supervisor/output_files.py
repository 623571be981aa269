"""The workers' output files on this node: reserved space, time index, and discarded output if space is short.

A `print` on a full disk would end a rank, so the supervisor discards stored output first: bytes that the head has, then
the oldest. It writes the offsets before it discards bytes, so no reader takes a hole for output. The journal gets an
event about discarded bytes at intervals, and at the end of the attempt.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING, Callable, NamedTuple

from clusterctl.agent.linux import syscalls
from clusterctl.agent.node_state import output_offsets
from clusterctl.agent.node_state.output_offsets import OffsetTable
from clusterctl.agent.protocol import events, run_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from clusterctl.agent.node_state.run_dir import RunDir


BLOCK_BYTES = 4096
TAIL_BYTES = 64 * 1024
"""Bytes at the end of the replicated part that stay, so that a new controller can compare them."""
_INDEX_RESERVE = 64 * 1024
_INDEX_BYTES, _INDEX_SECONDS = 4096, 1.0
"""A new index record is due after this many new bytes, or after this many seconds."""


class OutputFile:
    """One output. During its attempt it is an `OpenOutputFile`; later no descriptor is open.

    Args:
        run: The run.
        attempt: Number of the attempt.
        rank: The rank.
        offset_table: Offsets of the attempt, kept open by the caller; by default opened for each access.

    Attributes:
        offsets: The offsets of this output, as in the table.
        fd: Descriptor for the worker, or -1.
        why: The reason for which bytes were discarded last.
        journalled_at: Monotonic time of the last journal event about it.
    """

    def __init__(self, run: RunDir, attempt: int, rank: int, offset_table: OffsetTable | None = None) -> None:
        self.attempt, self.rank = attempt, rank
        self.path = run.of_rank(attempt, rank, "log")
        self._index_path = run.of_rank(attempt, rank, "idx")
        self._index_safe = 0
        self._offset_table = offset_table or OffsetTable(run.attempt(attempt))
        self._shared = offset_table is not None
        self.offsets = self._offset_table.read_offsets(rank)
        self.fd = -1
        self.why = ""
        self.journalled_at = float("-inf")
        if offset_table is None:
            self._offset_table.close()
            with contextlib.suppress(OSError):
                self.offsets.size = max(self.offsets.size, self.offsets.file_start + os.stat(self.path).st_size)

    @property
    def remaining_bytes(self) -> int:
        """Bytes that are still in the file."""
        return self.offsets.size - self.offsets.first_valid

    def write_offsets(self) -> None:
        """Write the offsets to the table."""
        self._offset_table.write_offsets(self.rank, self.offsets)
        if not self._shared:
            self._offset_table.close()

    def record_replicated(self, offset: int) -> None:
        """Record how much of the output the head has."""
        size = self.offsets.size if self.fd < 0 else self.offsets.file_start + os.fstat(self.fd).st_size
        self.offsets.replicated = max(self.offsets.replicated, min(offset, size))
        self.write_offsets()

    def record_replicated_index(self, offset: int) -> None:
        """Record how much of the time index the head has, and punch out records that describe no remaining byte."""
        safe = _round_down(offset - TAIL_BYTES)
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

    def discard_front(self, target: int, why: str) -> int:
        """Discard everything before `target`, in whole blocks; return the freed bytes."""
        offsets = self.offsets
        before, after = offsets.first_valid - offsets.file_start, _round_down(target - offsets.file_start)
        if after <= before:
            return 0
        offsets.lost += max(0, offsets.file_start + after - max(offsets.first_valid, offsets.replicated))
        offsets.first_valid, self.why = offsets.file_start + after, why
        # Write the offsets first: readers check them again after each read.
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


class Growth(NamedTuple):
    """The growth of an output file since the last update, and whether its worker has emptied it since."""

    size_bytes: int
    emptied: bool


class OpenOutputFile(OutputFile):
    """The output of a running attempt.

    Args:
        run, attempt, rank, offset_table: See `OutputFile`.
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

    def update_offsets(self) -> Growth:
        """Update the offsets from the size of the file."""
        offsets, file_size = self.offsets, os.fstat(self.fd).st_size
        offsets.sent = self._offset_table.read_sent(self.rank)
        before, emptied = offsets.size, offsets.is_emptied(file_size)
        if emptied:
            self._start_part()
        offsets.size = offsets.file_start + file_size
        if offsets.size != before or emptied:
            self.write_offsets()
        return Growth(offsets.size - before, emptied)

    def _start_part(self) -> None:
        """Start a new part behind all bytes that may have been sent: the worker has emptied the file."""
        offsets = self.offsets
        handed = max(offsets.sent, offsets.replicated, offsets.first_valid)
        end, lost = max(offsets.size, handed), max(0, offsets.size - handed)
        # Leave a whole page empty if bytes are lost, so that a reader of the replica sees the gap.
        offsets.file_start = offsets.first_valid = _round_down(end + 2 * BLOCK_BYTES - 1) if lost else end
        offsets.lost += lost
        self._reserved, self.why = 0, "its worker emptied the file"

    # --- the index

    def _open_index(self) -> None:
        record = run_files.INDEX_RECORD
        self._index_size = os.fstat(self._index).st_size // record.size * record.size
        os.ftruncate(self._index, self._index_size)
        self._index_reserved = self._index_size
        last = os.pread(self._index, record.size, max(0, self._index_size - record.size))
        self._indexed, self._indexed_at = int(record.unpack(last)[0]) if last else 0, float("-inf")

    def append_index_record(self, *, last: bool = False) -> None:
        """Append an index record if there is enough new output, or at the end."""
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
    def reserve_shortfall(self) -> int:
        """Bytes that are missing in the reserve, 0 if it is large enough."""
        size = os.fstat(self.fd).st_size
        if self._reserved - size > self._reserve // 2 or not self._reserve:
            return 0
        return size + self._reserve - max(self._reserved, size)

    def extend_reserve(self) -> None:
        """Reserve space beyond the end of the output and its index.

        Raises:
            OSError: There is no space.
        """
        size = os.fstat(self.fd).st_size
        if self._reserve and syscalls.reserve_blocks(self.fd, size, self._reserve):
            self._reserved = size + self._reserve
        with contextlib.suppress(OSError):
            self._keep_index_reserve()

    def release_reserve(self) -> None:
        """Release the reserved space of the index, to which only this process writes."""
        if self._index_reserved > self._index_size:
            with contextlib.suppress(OSError):
                os.ftruncate(self._index, self._index_size)
            self._index_reserved = self._index_size

    def close(self) -> None:
        """Release the reserve and close the files."""
        with contextlib.suppress(OSError):
            # Setting the size to itself frees blocks beyond the end. A stray may still write, so the size is read right
            # before, and only when nothing of the attempt is left.
            for fd in (self.fd, self._index):
                os.ftruncate(fd, os.fstat(fd).st_size)
        os.close(self.fd)
        os.close(self._index)


def _round_down(value: int) -> int:
    return value // BLOCK_BYTES * BLOCK_BYTES


_STEP_BYTES = 1 << 20
_FAST_GROWTH_DIVISOR = 8
"""An output that grows by more than 1/8 of its reserve between two updates is updated more often."""
_JOURNAL_EVERY_BYTES, _JOURNAL_EVERY_S = 64 << 20, 60.0
"""The journal gets an event after this many discarded bytes, or after this many seconds if bytes were lost."""
_FULL, _LIMIT = "disk full", "logs.max_size"
_LOG = re.compile(r"rank-(\d+)\.log")


class OutputFiles:
    """The output files of one attempt, and those of earlier attempts.

    Args:
        run: The run.
        attempt: Number of the attempt.
        reserve: Bytes to reserve beyond the end of each file.
        max_size: Bytes per file above which replicated bytes are discarded; `None` for no limit.
        record: Writes an event to the journal.
        journalled: First valid byte and lost bytes of each output, as in the journal (`NodeState.dropped`).
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
        self._offset_table = OffsetTable(run.attempt(attempt))
        self._files: dict[int, OpenOutputFile] = {}
        self._past: dict[tuple[int, int], OutputFile] = {}
        self._all_past = False
        self._alarmed: set[str] = set()

    # --- the files of the attempt

    def make(self, ranks: Iterable[int]) -> None:
        """Make or open the files of these ranks and reserve space.

        Raises:
            OSError: No space, or not writable.
        """
        wanted = list(ranks)
        self._offset_table.make(wanted)
        for rank in wanted:
            self.open(rank)

    def open(self, rank: int) -> None:
        """Make or open the files of a rank and reserve space.

        Raises:
            OSError: No space, or not writable.
        """
        one = self._files[rank] = OpenOutputFile(self._run, self._attempt, rank, self._offset_table, self._reserve)
        one.offsets.first_valid = max(one.offsets.first_valid, self._get_journalled(one)[0])
        self._update_output(one)
        one.extend_reserve()

    def __contains__(self, rank: int) -> bool:
        """Whether the files of a rank are open."""
        return rank in self._files

    def descriptor(self, rank: int) -> int:
        """Return the descriptor of a worker's output."""
        return self._files[rank].fd

    def update(self) -> bool:
        """Update offsets, index and reserve of all files, and enforce the limit. Call this every 250 ms.

        Returns:
            Whether an output grows so fast that `extend_reserves` should run before the next call.
        """
        fast = False
        for one in self._files.values():
            grown = self._update_output(one)
            fast = fast or grown * _FAST_GROWTH_DIVISOR > self._reserve > 0
            self._keep_reserve(one)
            one.append_index_record()
            if self._max_size is not None:
                self._hold_limit(one, self._max_size)
            self._journal_drop(one)
        return fast

    def _update_output(self, one: OpenOutputFile) -> int:
        growth = one.update_offsets()
        if growth.emptied:
            self._alarm(
                "output_emptied",
                f"rank {one.rank} has emptied its own output, as `> /dev/stderr` and `open('/dev/stdout', 'w')` do:"
                " what had not been sent is lost; `>&2`, `>> /dev/stderr` and mode 'a' keep it",
                one.rank,
            )
        return growth.size_bytes

    def extend_reserves(self) -> None:
        """Extend the reserves between two updates."""
        for one in self._files.values():
            self._keep_reserve(one)

    def release_reserve(self, rank: int) -> None:
        """Release a little space on a full disk, so that a waiter can write an exit file."""
        if rank in self._files:
            self._files[rank].release_reserve()

    def close(self) -> None:
        """Update once more, release the reserves and close all files."""
        for one in self._files.values():
            with contextlib.suppress(OSError):
                self._update_output(one)
            one.append_index_record(last=True)
            self._journal_drop(one, last=True)
            one.close()
        self._files.clear()
        self._offset_table.close()

    # --- space

    def _keep_reserve(self, one: OpenOutputFile) -> None:
        wanted = one.reserve_shortfall
        if not wanted:
            return
        try:
            one.extend_reserve()
        except OSError:
            self._make_room(wanted + _STEP_BYTES)
            with contextlib.suppress(OSError):
                one.extend_reserve()

    def _make_room(self, wanted: int) -> None:
        """Free at least that many bytes if possible."""
        self._alarm("disk_full", "the disk is full: the oldest output gives way, what is already on the head first")
        past = self._list_past_outputs()
        replicated = [(one, one.offsets.replicated) for one in (*past, *self._files.values())]
        for one, end in (*replicated, *((one, one.offsets.size) for one in past)):
            if wanted > 0:
                wanted -= self._discard_front(one, min(end - TAIL_BYTES, one.offsets.first_valid + wanted), _FULL)
        while wanted > 0:
            largest = max(self._files.values(), key=lambda each: each.remaining_bytes)
            target = largest.offsets.first_valid + max(wanted, _STEP_BYTES)
            freed = self._discard_front(largest, min(largest.offsets.size - TAIL_BYTES, target), _FULL)
            if freed <= 0:
                return
            wanted -= freed

    def _hold_limit(self, one: OutputFile, limit: int) -> None:
        target = min(one.offsets.size - limit, one.offsets.replicated - TAIL_BYTES)
        if target - one.offsets.first_valid >= max(BLOCK_BYTES, min(_STEP_BYTES, limit)):
            self._discard_front(one, target, _LIMIT)

    def _discard_front(self, one: OutputFile, target: int, why: str) -> int:
        freed = one.discard_front(target, why)
        self._journal_drop(one)
        return freed

    # --- replicated output, and earlier attempts

    def record_replicated_file(self, name: str, offset: int) -> None:
        """Record how much of a file the head has; any file name is accepted."""
        output = run_files.parse_attempt_and_rank(name)
        index = run_files.parse_attempt_and_rank(name, run_files.format_index_path)
        if output is not None:
            self.record_replicated(*output, offset)
        elif index is not None:
            self.record_replicated_index(*index, offset)

    def record_replicated(self, attempt: int, rank: int, offset: int) -> None:
        """Record how much of an output the head has; with a limit, discard it if its attempt is over."""
        one = self._get_output(attempt, rank)
        one.record_replicated(offset)
        if one.fd < 0 and self._max_size is not None:
            self._hold_limit(one, 0)
            self._journal_drop(one, last=one.offsets.replicated >= one.offsets.size)

    def record_replicated_index(self, attempt: int, rank: int, offset: int) -> None:
        """Record how much of a time index the head has."""
        self._get_output(attempt, rank).record_replicated_index(offset)

    def _get_output(self, attempt: int, rank: int) -> OutputFile:
        if attempt == self._attempt and rank in self._files:
            return self._files[rank]
        past = self._past.get((attempt, rank))
        if past is None:
            past = self._past[attempt, rank] = OutputFile(self._run, attempt, rank)
        return past

    def _list_past_outputs(self) -> list[OutputFile]:
        """Return the outputs of earlier attempts that still have bytes to discard, oldest first."""
        if not self._all_past:
            with contextlib.suppress(OSError):
                for attempt in range(self._attempt):
                    folder = self._run.attempt(attempt)
                    for name in os.listdir(folder) if os.path.isdir(folder) else ():
                        if match := _LOG.fullmatch(name):
                            self._get_output(attempt, int(match[1]))
                self._all_past = True
        return sorted(
            (o for o in self._past.values() if o.remaining_bytes > TAIL_BYTES), key=lambda o: (o.attempt, o.rank)
        )

    # --- events

    def _get_journalled(self, one: OutputFile) -> tuple[int, int]:
        return self._journalled.get((one.attempt, one.rank), (0, 0))

    def _journal_drop(self, one: OutputFile, *, last: bool = False) -> None:
        """Journal discarded output, but not every time: the events alone would fill the disk in a long run."""
        first_valid, lost = self._get_journalled(one)
        gone, lost, now = one.offsets.first_valid - first_valid, one.offsets.lost - lost, time.monotonic()
        if not gone and not lost:
            return
        late = now - one.journalled_at >= _JOURNAL_EVERY_S and (lost > 0 or one.why != _LIMIT)
        if last or late or gone >= _JOURNAL_EVERY_BYTES:
            one.journalled_at = now
            self._record(events.OutputDropped(one.attempt, one.rank, one.offsets.first_valid, lost, one.why))

    def _alarm(self, code: str, message: str, rank: int | None = None) -> None:
        if code not in self._alarmed:
            self._alarmed.add(code)
            self._record(events.Alarm(self._attempt, code, message, rank=rank))
