"""The output files of a run on this node: which space they take, and which of them gives way when there is none left.

A `print` on a full disk would end a rank, so bytes of ours give way first: those that are safe on the head, then the
oldest. What is given up stands in the tally before it is done, so that nobody who reads takes a hole for output; the
journal hears of it now and then, and at the end of the attempt.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING, Callable

from clusterctl.agent.node_state.output_offsets import OffsetTable
from clusterctl.agent.protocol import events, run_files
from clusterctl.agent.supervisor.output import BLOCK, TAIL, OpenOutput, Output

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from clusterctl.agent.node_state.run_dir import RunDir

_STEP = 1 << 20
_FAST = 8
"""What grows by more than this part of the reserve from one look to the next is looked at more often."""
_TOLD_BYTES, _TOLD_SECONDS = 64 << 20, 60.0
"""The journal hears of so much that was given up at once; where something is lost, of less after so long."""
_FULL, _LIMIT = "disk full", "logs.max_size"
_LOG = re.compile(r"rank-(\d+)\.log")


class Outputs:
    """The output files of one attempt, and those of the attempts before it.

    Args:
        run: Whose.
        attempt: The attempt.
        reserve: Bytes to reserve beyond the end of each file.
        max_size: Bytes of each file after which what is replicated is given up; `None` for never.
        record: Writes an event into the journal.
        told: What the journal was told of already, as it is now (`NodeState.dropped`).
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        reserve: int,
        max_size: int | None,
        record: Callable[[events.Event], object],
        told: Mapping[tuple[int, int], tuple[int, int]],
    ) -> None:
        self._run, self._attempt = run, attempt
        self._reserve, self._max_size = reserve, max_size
        self._record, self._told = record, told
        self._offset_table = OffsetTable(run.attempt(attempt))
        self._files: dict[int, OpenOutput] = {}
        self._past: dict[tuple[int, int], Output] = {}
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
        one = self._files[rank] = OpenOutput(self._run, self._attempt, rank, self._offset_table, self._reserve)
        one.offsets.first_valid = max(one.offsets.first_valid, self._told_of(one)[0])
        self._see(one)
        one.extend()

    def __contains__(self, rank: int) -> bool:
        """Whether the files of a rank are open."""
        return rank in self._files

    def descriptor(self, rank: int) -> int:
        """Return the descriptor that a worker writes to."""
        return self._files[rank].fd

    def look(self) -> bool:
        """See what has grown: write the index, keep the reserve, hold the limit. To be called every 250 ms.

        Returns:
            Whether something grows so fast that the reserve should be looked at earlier (`keep_up`).
        """
        fast = False
        for one in self._files.values():
            grown = self._see(one)
            fast = fast or grown * _FAST > self._reserve > 0
            self._keep_reserve(one)
            one.index()
            if self._max_size is not None:
                self._hold_limit(one, self._max_size)
            self._tell(one)
        return fast

    def _see(self, one: OpenOutput) -> int:
        grown, emptied = one.look()
        if emptied:
            self._alarm(
                "output_emptied",
                f"rank {one.rank} has emptied its own output, as `> /dev/stderr` and `open('/dev/stdout', 'w')` do:"
                " what had not been sent is lost; `>&2`, `>> /dev/stderr` and mode 'a' keep it",
                one.rank,
            )
        return grown

    def keep_up(self) -> None:
        """Keep the reserve ahead of what grows, between two looks."""
        for one in self._files.values():
            if not one.is_emptied:
                self._keep_reserve(one)

    def make_way(self, rank: int) -> None:
        """Give back a little space on a disk that may be full: somebody has to say how the worker of a rank ended."""
        if rank in self._files:
            self._files[rank].make_way()

    def close(self) -> None:
        """Take a last look, give back the reserve and close all files."""
        for one in self._files.values():
            with contextlib.suppress(OSError):
                self._see(one)
            one.index(last=True)
            self._tell(one, last=True)
            one.close()
        self._files.clear()
        self._offset_table.close()

    # --- space

    def _keep_reserve(self, one: OpenOutput) -> None:
        wanted = one.wanted
        if not wanted:
            return
        try:
            one.extend()
        except OSError:
            self._make_room(wanted + _STEP)
            with contextlib.suppress(OSError):
                one.extend()

    def _make_room(self, wanted: int) -> None:
        """Free at least that many bytes, if there are so many to free."""
        self._alarm("disk_full", "the disk is full: the oldest output gives way, what is already on the head first")
        past = self._before()
        for one in (*past, *self._files.values()):
            if wanted > 0:
                wanted -= self._cut(one, min(one.offsets.replicated - TAIL, one.offsets.first_valid + wanted), _FULL)
        for one in past:
            if wanted > 0:
                wanted -= self._cut(one, min(one.offsets.size - TAIL, one.offsets.first_valid + wanted), _FULL)
        while wanted > 0:
            largest = max(self._files.values(), key=lambda each: each.held)
            target = largest.offsets.first_valid + max(wanted, _STEP)
            freed = self._cut(largest, min(largest.offsets.size - TAIL, target), _FULL)
            if freed <= 0:
                return
            wanted -= freed

    def _hold_limit(self, one: Output, limit: int) -> None:
        target = min(one.offsets.size - limit, one.offsets.replicated - TAIL)
        if target - one.offsets.first_valid >= max(BLOCK, min(_STEP, limit)):
            self._cut(one, target, _LIMIT)

    def _cut(self, one: Output, target: int, why: str) -> int:
        freed = one.cut(target, why)
        self._tell(one)
        return freed

    # --- what is on the head, and the attempts before

    def replicated_file(self, name: str, offset: int) -> None:
        """Take note that the head has the beginning of a file, whatever it is."""
        output = run_files.parse_attempt_and_rank(name)
        index = run_files.parse_attempt_and_rank(name, run_files.format_index_path)
        if output is not None:
            self.replicated(*output, offset)
        elif index is not None:
            self.index_replicated(*index, offset)

    def replicated(self, attempt: int, rank: int, offset: int) -> None:
        """Take note of what is safe on the head; of an attempt that is over it is given up, where there is a limit."""
        open_one = self._files.get(rank) if attempt == self._attempt else None
        one = open_one or self._of_past(attempt, rank)
        one.replicated(offset)
        if open_one is None and self._max_size is not None:
            self._hold_limit(one, 0)
            self._tell(one, last=one.offsets.replicated >= one.offsets.size)

    def index_replicated(self, attempt: int, rank: int, offset: int) -> None:
        """Take note of what of a time index is safe on the head."""
        open_one = self._files.get(rank) if attempt == self._attempt else None
        (open_one or self._of_past(attempt, rank)).index_replicated(offset)

    def _of_past(self, attempt: int, rank: int) -> Output:
        past = self._past.get((attempt, rank))
        if past is None:
            past = self._past[attempt, rank] = Output(self._run, attempt, rank)
        return past

    def _before(self) -> list[Output]:
        """Return the output of the attempts before, the oldest first, as far as there is anything to be had of it."""
        if not self._all_past:
            with contextlib.suppress(OSError):
                for attempt in range(self._attempt):
                    for rank in _ranks_in(self._run.attempt(attempt)):
                        self._of_past(attempt, rank)
                self._all_past = True
        return sorted((o for o in self._past.values() if o.held > TAIL), key=lambda o: (o.attempt, o.rank))

    # --- what is said of it

    def _told_of(self, one: Output) -> tuple[int, int]:
        return self._told.get((one.attempt, one.rank), (0, 0))

    def _tell(self, one: Output, *, last: bool = False) -> None:
        """Let the journal know what is gone: not each time, or a long run would fill the disk with that alone."""
        first_valid, lost = self._told_of(one)
        gone, lost, now = one.offsets.first_valid - first_valid, one.offsets.lost - lost, time.monotonic()
        if not gone and not lost:
            return
        late = now - one.told_at >= _TOLD_SECONDS and (lost > 0 or one.why != _LIMIT)
        if last or late or gone >= _TOLD_BYTES:
            one.told_at = now
            self._record(events.Dropped(one.attempt, one.rank, one.offsets.first_valid, lost, one.why))

    def _alarm(self, code: str, message: str, rank: int | None = None) -> None:
        if code not in self._alarmed:
            self._alarmed.add(code)
            self._record(events.Alarm(self._attempt, code, message, rank=rank))


def _ranks_in(folder: str) -> list[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(int(match[1]) for match in map(_LOG.fullmatch, names) if match)
