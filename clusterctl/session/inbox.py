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
        self._lock = threading.Lock()
        self._places: dict[tuple[type, str], threading.Semaphore] = {}
        self._closed = False

    def put(self, item: Any) -> None:
        """Add an item; waits where too many of that node are there already."""
        places = self._places_of(item)
        while places is not None and not self._closed and not places.acquire(timeout=_LOOK_SECONDS):
            pass
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
        places = self._places_of(item)
        if places is not None:
            places.release()
        return item

    def _places_of(self, item: Any) -> threading.Semaphore | None:
        most = MOST.get(type(item))
        if most is None:
            return None
        key = (type(item), item.node)
        with self._lock:
            places = self._places.get(key)
            if places is None:
                places = self._places[key] = threading.Semaphore(most)
            return places
