"""What arrives for the loop of a run: so much of each node and no more, so that one that floods holds up itself alone.

A session that finds no place waits on its reading thread, which holds back the node over the network.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from clusterctl.session.items import EventReceived, OutputReceived, WholeReceived

MOST = {EventReceived: 64, OutputReceived: 1024, WholeReceived: 64}
"""Items of one node that may wait. The bytes of output are bounded by credit, those of events by their length."""
_LOOK_SECONDS = 1.0


class Inbox:
    """A queue for any number of sessions and one loop; see `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._taken_any = threading.Condition()
        self._there: dict[tuple[type, str], int] = {}
        self._waiting = 0
        self._closed = False

    def put(self, item: Any) -> None:
        """Add an item; waits where too many of that node are there already."""
        most = MOST.get(type(item))
        if most is not None:
            key = (type(item), item.node)
            with self._taken_any:
                while self._there.get(key, 0) >= most and not self._closed:
                    self._waiting += 1
                    self._taken_any.wait(_LOOK_SECONDS)
                    self._waiting -= 1
                self._there[key] = self._there.get(key, 0) + 1
        self._items.put(item)

    def get(self, timeout: float | None = None) -> Any:
        """Take an item.

        Raises:
            queue.Empty: None came for `timeout` seconds.
        """
        return self._taken(self._items.get(timeout=timeout))

    def get_nowait(self) -> Any:
        """Take an item that is there.

        Raises:
            queue.Empty: None is.
        """
        return self._taken(self._items.get_nowait())

    def close(self) -> None:
        """Let everybody go who waits for a place: nobody takes anything any more."""
        self._closed = True

    def _taken(self, item: Any) -> Any:
        if type(item) in MOST:
            with self._taken_any:
                self._there[type(item), item.node] -= 1
                # Hardly ever: a node that sends more than its share.
                if self._waiting:
                    self._taken_any.notify_all()
        return item
