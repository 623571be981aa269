"""The queue through which all sessions pass received data to the loop of a controller, and the types of its items.

The queue limits the items of each node. At the limit, the reader thread of that node's session waits, and TCP slows
down that node only.
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
    """A line of a journal. `record` is the decoded JSON object, including fields that this version does not know."""

    node: str
    run: str
    stamp: Stamp
    event: Event
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OutputReceived:
    """Bytes of a file of a run, from `offset` on. The receiver grants as much credit once they are on disk.

    `place` is the attempt and rank of the file; `None` for the file of samples.
    """

    node: str
    run: str
    file: str
    place: tuple[int, int] | None
    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class AttemptsReplicated:
    """The node has sent all its data of the attempts with a number below `before`."""

    node: str
    run: str
    before: int


@dataclass(frozen=True, slots=True)
class StreamReceived:
    """Bytes of a stream that the head has allocated for a request, without a listener."""

    node: str
    stream: int
    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ClockMeasured:
    """The clock offsets of a node, measured by a heartbeat.

    Attributes:
        wall_offset_s: The node's wall clock minus the head's.
        mono_offset_s: The node's monotonic clock minus the head's.
        error_s: The maximum error of both offsets: half the round-trip time.
        boot: The boot id of the node.
    """

    node: str
    wall_offset_s: float
    mono_offset_s: float
    error_s: float
    boot: str


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session ended without a call of `close`. This is the last item of a session."""

    node: str
    error: NodeError


@dataclass(frozen=True, slots=True)
class ControllerSuperseded:
    """The node obeys a later controller of this run, so this controller must stop."""

    node: str


InboxItem = (
    EventReceived
    | OutputReceived
    | AttemptsReplicated
    | StreamReceived
    | ClockMeasured
    | SessionLost
    | ControllerSuperseded
)


class InboxItemQueue(Protocol):
    """A queue to which a session adds items. The session waits while the queue is full."""

    def put(self, item: InboxItem) -> None:
        """Add an item."""


MAX_ITEMS_PER_NODE = {EventReceived: 64, OutputReceived: 1024, AttemptsReplicated: 64}
"""The maximum number of items of one node in the queue. The credit limits the bytes of output, and the maximum line
length limits the bytes of events.
"""
_RECHECK_S = 1.0


class Inbox:
    """The queue between any number of sessions and one loop, with the methods of `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._removed = threading.Condition()
        self._counts: dict[tuple[type, str], int] = {}
        self._waiting = 0
        self._closed = False

    def put(self, item: Any) -> None:
        """Add an item; wait while the queue holds the maximum number of items of the item's node."""
        limit = MAX_ITEMS_PER_NODE.get(type(item))
        if limit is not None:
            key = (type(item), item.node)
            with self._removed:
                while self._counts.get(key, 0) >= limit and not self._closed:
                    self._waiting += 1
                    self._removed.wait(_RECHECK_S)
                    self._waiting -= 1
                self._counts[key] = self._counts.get(key, 0) + 1
        self._items.put(item)

    def get(self, timeout: float | None = None) -> Any:
        """Remove and return an item.

        Raises:
            queue.Empty: No item arrived within `timeout` seconds.
        """
        return self._count_removed(self._items.get(timeout=timeout))

    def get_nowait(self) -> Any:
        """Remove and return an item without waiting.

        Raises:
            queue.Empty: The queue is empty.
        """
        return self._count_removed(self._items.get_nowait())

    def close(self) -> None:
        """Wake every thread that waits in `put`, because the controller's loop has ended."""
        self._closed = True

    def _count_removed(self, item: Any) -> Any:
        if type(item) in MAX_ITEMS_PER_NODE:
            with self._removed:
                self._counts[type(item), item.node] -= 1
                # Usually no thread waits: a thread waits only if its node sends more than the limit.
                if self._waiting:
                    self._removed.notify_all()
        return item
