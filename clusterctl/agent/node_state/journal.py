"""The journal of a run on a node, its single writer, its readers, and the state that it describes.

Each line is a JSON object; sequence numbers rise by one.
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
class NodeState:
    """State of a run on this node, folded from its journal; ranks, ports and exits belong to the newest attempt.

    Attributes:
        seq: Sequence number of the last event.
        attempt: The newest attempt, -1 before the first.
        finished: The event that finished the run.
        boot: Boot id of the last event; after a reboot no process of the run is left.
        start_boots: Boot id in which each rank started.
        stopping: Monotonic time of the stop signal, and the event.
        dropped: By attempt and rank: the first valid byte of the output, and how many discarded bytes no head has.
        began: Wall time of the first prepare.
        ended: Wall time of the end of the run.
    """

    seq: int = 0
    attempt: int = -1
    finished: events.Finished | None = None
    boot: str = ""
    ports: list[int] = field(default_factory=list)
    started: dict[int, events.Started] = field(default_factory=dict)
    start_boots: dict[int, str] = field(default_factory=dict)
    exited: dict[int, events.Exited] = field(default_factory=dict)
    stopping: tuple[float, events.Stopping] | None = None
    swept: events.Swept | None = None
    dropped: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    began: float | None = None
    ended: float | None = None

    @property
    def state(self) -> str:
        """State of the run on the node: `new, prepared, started, stopping, exited, swept, finished`."""
        if self.finished is not None:
            return "finished"
        if self.swept is not None:
            return "swept"
        if self.stopping is not None:
            return "stopping"
        if self.started:
            return "exited" if self.started.keys() <= self.exited.keys() else "started"
        return "prepared" if self.attempt >= 0 else "new"


def apply_event(state: NodeState, stamp: events.Stamp, event: events.Event) -> None:
    """Apply one event to a state."""
    state.seq, state.boot = stamp.seq, stamp.boot
    if isinstance(event, events.Prepared):
        state.attempt, state.ports = event.attempt, event.ports
        state.started, state.start_boots, state.exited = {}, {}, {}
        state.stopping, state.swept = None, None
        if state.began is None:
            state.began = stamp.wall
    elif isinstance(event, events.Started):
        state.started[event.rank], state.start_boots[event.rank] = event, stamp.boot
    elif isinstance(event, events.Exited):
        state.exited[event.rank] = event
    elif isinstance(event, events.Stopping):
        state.stopping = state.stopping or (stamp.mono, event)
    elif isinstance(event, events.Swept):
        state.swept = event
    elif isinstance(event, events.Finished):
        state.finished, state.ended = event, stamp.wall
    elif isinstance(event, events.OutputDropped):
        key = (event.attempt, event.rank)
        first_valid, lost = state.dropped.get(key, (0, 0))
        state.dropped[key] = (max(first_valid, event.first_valid), lost + event.lost)


def fold_journal(entries: Iterable[tuple[events.Stamp, events.Event]]) -> NodeState:
    """Return the state that a whole journal describes."""
    state = NodeState()
    for stamp, event in entries:
        apply_event(state, stamp, event)
    return state


_RESERVE_BYTES = 1 << 20
_MIN_RESERVE_BYTES = 256 << 10
_READ_BYTES = 64 << 10
"""A journal may be larger than the memory, so it is read in pieces of this size."""


class JournalReader:
    """Reads the complete lines of a growing journal, with no open descriptor between two reads.

    A torn last line is read when it is complete.

    Attributes:
        was_restarted: The last read found another file or a shorter one, and read it from the start.
    """

    def __init__(self, path: str) -> None:
        self.was_restarted = False
        self._path = path
        self._position = self._inode = 0

    def read_lines(self) -> Iterator[bytes]:
        """Yield the new lines without their newline, piece by piece.

        Lines that the caller does not take are yielded again by the next call.
        """
        self.was_restarted = False
        try:
            status = os.stat(self._path)
        except OSError:
            return iter(())
        if status.st_ino != self._inode or status.st_size < self._position:
            self.was_restarted = self._inode != 0
            self._inode, self._position = status.st_ino, 0
        return iter(()) if status.st_size == self._position else self._new()

    def _new(self) -> Iterator[bytes]:
        with contextlib.suppress(OSError), open(self._path, "rb", buffering=_READ_BYTES) as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line[:-1]

    def read_events(self) -> Iterator[tuple[events.Stamp, events.Event]]:
        """Yield the events of the new lines; unknown kinds are skipped."""
        for line in self.read_lines():
            with contextlib.suppress(frames.FrameError):
                entry = events.decode_event(line)
                if entry is not None:
                    yield entry


def read_journal(path: str) -> Iterator[tuple[events.Stamp, events.Event]]:
    """Yield the events of a journal; a torn last line and unknown kinds are skipped."""
    return JournalReader(path).read_events()


class JournalWriter:
    """The writer of a journal; only the supervisor of a run has one.

    It reserves space beyond the end of the file for a full disk. Lines that do not fit are queued until `flush`
    succeeds.
    """

    def __init__(self, path: str) -> None:
        """Open the journal, cut off a torn last line and continue its sequence numbers."""
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
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        if self._reserved - self._end >= _MIN_RESERVE_BYTES:
            return
        with contextlib.suppress(OSError):
            syscalls.reserve_blocks(self._fd, self._end, _RESERVE_BYTES)
            self._reserved = self._end + _RESERVE_BYTES

    def append(self, event: events.Event) -> events.Stamp:
        """Append an event behind the queued ones; followers see it as soon as it is written."""
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
                # A part of a line would spoil the next one. This also gives back the reserve, which was too small.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._end)
                self._reserved = self._end
                return False
            self._end += len(self._waiting.popleft())
            self._keep_reserve()
        return True

    def close(self) -> None:
        """Release the reserved space and close the file."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end)
        os.close(self._fd)


class JournalCache:
    """States of all runs on this node, each folded only for new lines. Callers must not change a returned state."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[JournalReader, NodeState]] = {}

    def read_state(self, run: RunDir) -> NodeState:
        """Return the state of a run; without a journal it is a new state."""
        reader, state = self._known.get(run.path) or (JournalReader(run.journal), NodeState())
        entries = reader.read_events()
        if reader.was_restarted:
            state = NodeState()
        for entry in entries:
            apply_event(state, *entry)
        self._known[run.path] = (reader, state)
        return state
