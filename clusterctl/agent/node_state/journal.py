"""The writer and the readers of a run's journal on a node, and the computation of the run's state from events.

Each line of the journal is a JSON object with one event. The sequence number rises by one from line to line.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.agent.linux import proc, syscalls
from clusterctl.agent.protocol import events, frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clusterctl.agent.node_state.run_dir import RunDir


@dataclass
class JournalState:
    """State of a run on this node, computed from its journal. Ranks, ports and exits are those of the newest attempt.

    Attributes:
        seq: Sequence number of the last event.
        attempt: Number of the newest attempt, -1 before the first.
        ports: The reserved ports.
        started: The start event of each rank.
        exited: The exit event of each rank.
        swept: The event after the sweep, or `None`.
        finished: The event that finished the run, or `None`.
        boot_id: Boot id at the last event. If the machine has another boot id now, no process of the run lives.
        start_boots: Boot id at the start of each rank.
        stopping: Monotonic time of the stop signal and the event about the stop, or `None`.
        dropped: By attempt and rank, two numbers about the output: the offset of its first byte that is not discarded,
            and the number of discarded bytes that no head has.
        began_at: Wall time of the first `prepare`.
        ended_at: Wall time of the end of the run.
    """

    seq: int = 0
    attempt: int = -1
    finished: events.Finished | None = None
    boot_id: str = ""
    ports: list[int] = field(default_factory=list)
    started: dict[int, events.Started] = field(default_factory=dict)
    start_boots: dict[int, str] = field(default_factory=dict)
    exited: dict[int, events.Exited] = field(default_factory=dict)
    stopping: tuple[float, events.Stopping] | None = None
    swept: events.Swept | None = None
    dropped: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    began_at: float | None = None
    ended_at: float | None = None

    @property
    def phase(self) -> str:
        """How far the run is on this node: `new`, `prepared`, `started`, `stopping`, `exited`, `swept`, `finished`."""
        if self.finished is not None:
            return "finished"
        if self.swept is not None:
            return "swept"
        if self.stopping is not None:
            return "stopping"
        if self.started:
            return "exited" if self.started.keys() <= self.exited.keys() else "started"
        return "prepared" if self.attempt >= 0 else "new"


def apply_event(state: JournalState, stamp: events.Stamp, event: events.Event) -> None:
    """Update a state with the next event of the journal."""
    state.seq, state.boot_id = stamp.seq, stamp.boot
    if isinstance(event, events.Prepared):
        state.attempt, state.ports = event.attempt, event.ports
        state.started, state.start_boots, state.exited = {}, {}, {}
        state.stopping, state.swept = None, None
        if state.began_at is None:
            state.began_at = stamp.wall
    elif isinstance(event, events.Started):
        state.started[event.rank], state.start_boots[event.rank] = event, stamp.boot
    elif isinstance(event, events.Exited):
        state.exited[event.rank] = event
    elif isinstance(event, events.Stopping):
        state.stopping = state.stopping or (stamp.mono, event)
    elif isinstance(event, events.Swept):
        state.swept = event
    elif isinstance(event, events.Finished):
        state.finished, state.ended_at = event, stamp.wall
    elif isinstance(event, events.OutputDropped):
        key = (event.attempt, event.rank)
        first_valid, lost = state.dropped.get(key, (0, 0))
        state.dropped[key] = (max(first_valid, event.first_valid), lost + event.lost)


def fold_journal(entries: Iterable[tuple[events.Stamp, events.Event]]) -> JournalState:
    """Return the state after all events of a journal."""
    state = JournalState()
    for stamp, event in entries:
        apply_event(state, stamp, event)
    return state


_RESERVE_BYTES = 1 << 20
_MIN_RESERVE_BYTES = 256 << 10
_READ_BYTES = 64 << 10
"""The reader reads pieces of this many bytes, because a journal may be larger than the memory."""


class JournalReader:
    """Reads the new lines of a growing journal; the file is open only during a read.

    An incomplete last line is not read before it is complete.

    Attributes:
        was_restarted: Whether the last read began at the start of the file, because the file was replaced or truncated.
    """

    def __init__(self, path: str) -> None:
        self.was_restarted = False
        self._path = path
        self._position = self._inode = 0

    def read_lines(self) -> Iterator[bytes]:
        """Yield the new lines without their newline.

        If the caller stops early, the next call yields the remaining lines.
        """
        self.was_restarted = False
        try:
            status = os.stat(self._path)
        except OSError:
            return iter(())
        if status.st_ino != self._inode or status.st_size < self._position:
            self.was_restarted = self._inode != 0
            self._inode, self._position = status.st_ino, 0
        return iter(()) if status.st_size == self._position else self._read_new_lines()

    def _read_new_lines(self) -> Iterator[bytes]:
        with contextlib.suppress(OSError), open(self._path, "rb", buffering=_READ_BYTES) as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line[:-1]

    def read_events(self) -> Iterator[tuple[events.Stamp, events.Event]]:
        """Yield the events of the new lines, without events of unknown kinds."""
        for line in self.read_lines():
            with contextlib.suppress(frames.FrameError):
                entry = events.decode_event(line)
                if entry is not None:
                    yield entry


def read_journal(path: str) -> Iterator[tuple[events.Stamp, events.Event]]:
    """Yield the events of a journal, without an incomplete last line and without events of unknown kinds."""
    return JournalReader(path).read_events()


class JournalWriter:
    """Appends events to the journal of a run; only the supervisor of the run has a writer.

    The writer reserves disk space beyond the end of the file, so that later writes succeed even if the disk is full.
    Lines for which the disk still has no space are queued until `flush` succeeds.
    """

    def __init__(self, path: str) -> None:
        """Open the journal, remove an incomplete last line, and continue the sequence numbers of the journal."""
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._waiting: deque[bytes] = deque()
        self._end = 0
        self.seq = 0
        for line in JournalReader(path).read_lines():
            self._end += len(line) + 1
            with contextlib.suppress(frames.FrameError):
                entry = events.decode_event(line)
                self.seq = self.seq + 1 if entry is None else entry[0].seq
        os.ftruncate(self._fd, self._end)
        self._reserved = 0
        self._extend_reserve()

    def _extend_reserve(self) -> None:
        if self._reserved - self._end >= _MIN_RESERVE_BYTES:
            return
        with contextlib.suppress(OSError):
            syscalls.reserve_blocks(self._fd, self._end, _RESERVE_BYTES)
            self._reserved = self._end + _RESERVE_BYTES

    def append(self, event: events.Event) -> events.Stamp:
        """Append an event after the queued events; return the sequence number and the time of the event."""
        self.seq += 1
        stamp = events.Stamp(self.seq, time.time(), time.monotonic(), proc.read_boot_id())
        self._waiting.append(events.encode_event(stamp, event).encode() + b"\n")
        self.flush()
        return stamp

    def flush(self) -> bool:
        """Write the queued lines; return whether the queue is empty."""
        while self._waiting:
            try:
                syscalls.write_all(self._fd, self._waiting[0])
            except OSError:
                # Remove an incomplete line, because the next line would be appended to it. This frees the reserved
                # space too, which was too small.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._end)
                self._reserved = self._end
                return False
            self._end += len(self._waiting.popleft())
            self._extend_reserve()
        return True

    def close(self) -> None:
        """Release the reserved space and close the file."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end)
        os.close(self._fd)


class JournalCache:
    """Keeps the states of all runs on this node, and reads only new journal lines. Callers must not change a state."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[JournalReader, JournalState]] = {}

    def read_state(self, run: RunDir) -> JournalState:
        """Return the present state of a run, or an empty state if the run has no journal."""
        reader, state = self._known.get(run.path) or (JournalReader(run.journal_file), JournalState())
        entries = reader.read_events()
        if reader.was_restarted:
            state = JournalState()
        for entry in entries:
            apply_event(state, *entry)
        self._known[run.path] = (reader, state)
        return state
