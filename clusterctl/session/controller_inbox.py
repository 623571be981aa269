"""The queue from all sessions to the loop of a controller, and the items in it.

The queue has a limit per node. If a node's share is full, the reader thread of its session waits, and TCP holds back
that node alone.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from clusterctl.agent.protocol.events import Event, Stamp
from clusterctl.errors import (
    NodeError,
)


@dataclass(frozen=True, slots=True)
class EventReceived:
    """A line of a journal. `record` is the line as an object, with fields that only a newer agent knows."""

    node: str
    run: str
    stamp: Stamp
    event: Event
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OutputReceived:
    """Bytes of a file of a run from `offset` on. They used credit: grant it again once they are on disk."""

    node: str
    run: str
    file: str
    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class AttemptsReplicated:
    """The head has everything that the node holds of attempts below `before`."""

    node: str
    run: str
    before: int


@dataclass(frozen=True, slots=True)
class StreamReceived:
    """Bytes of a stream that our request named and that has no listener."""

    node: str
    stream: int
    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ClockMeasured:
    """The clock offsets of a node, measured by a heartbeat.

    Attributes:
        wall_offset_s: Node's wall clock minus ours.
        mono_offset_s: Node's monotonic clock minus ours.
        error_s: Error bound of both: half the round trip.
        boot: Boot id of the node.
    """

    node: str
    wall_offset_s: float
    mono_offset_s: float
    error_s: float
    boot: str


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session ended, and not by `close`. This is the last item of a session."""

    node: str
    error: NodeError


@dataclass(frozen=True, slots=True)
class ControllerSuperseded:
    """The node obeys a later controller of this run: this one must stop acting."""

    node: str


Item = (
    EventReceived
    | OutputReceived
    | AttemptsReplicated
    | StreamReceived
    | ClockMeasured
    | SessionLost
    | ControllerSuperseded
)


class ItemQueue(Protocol):
    """The queue that a session fills. A full queue makes the session wait."""

    def put(self, item: Item) -> None:
        """Add an item."""


MAX_ITEMS_PER_NODE = {EventReceived: 64, OutputReceived: 1024, AttemptsReplicated: 64}
"""How many items of one node may wait. Credit bounds the bytes of output, and the line limit those of events."""
_RECHECK_S = 1.0


class Inbox:
    """A queue for any number of sessions and one loop; see `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._removed = threading.Condition()
        self._count: dict[tuple[type, str], int] = {}
        self._waiting = 0
        self._closed = False

    def put(self, item: Any) -> None:
        """Add an item; wait while too many of that node are in the queue."""
        most = MAX_ITEMS_PER_NODE.get(type(item))
        if most is not None:
            key = (type(item), item.node)
            with self._removed:
                while self._count.get(key, 0) >= most and not self._closed:
                    self._waiting += 1
                    self._removed.wait(_RECHECK_S)
                    self._waiting -= 1
                self._count[key] = self._count.get(key, 0) + 1
        self._items.put(item)

    def get(self, timeout: float | None = None) -> Any:
        """Remove and return an item.

        Raises:
            queue.Empty: No item came within `timeout` seconds.
        """
        return self._taken(self._items.get(timeout=timeout))

    def get_nowait(self) -> Any:
        """Remove and return an item without waiting.

        Raises:
            queue.Empty: There is none.
        """
        return self._taken(self._items.get_nowait())

    def close(self) -> None:
        """Release every thread that waits in `put`: the loop has ended."""
        self._closed = True

    def _taken(self, item: Any) -> Any:
        if type(item) in MAX_ITEMS_PER_NODE:
            with self._removed:
                self._count[type(item), item.node] -= 1
                # Rare: only a node that sends more than its share makes a thread wait.
                if self._waiting:
                    self._removed.notify_all()
        return item
