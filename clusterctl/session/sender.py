"""A thread that sends the frames of one connection in order.

A caller that sends a request, a heartbeat or credit never waits for a slow node. A caller that sends bulk data waits
until the queue has room.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from clusterctl.transport.interfaces import Channel

_BULK_QUEUE_BYTES = 256 * 1024
"""The maximum size of the queue of bulk data. A larger queue would delay requests, and a smaller queue would slow down
a fast link.
"""


class Sender:
    """Writes frames to a channel until `close`, which drops all frames that are still in the queue.

    Args:
        channel: The connection.
        make_beat: A function that creates a heartbeat. The sender thread calls it immediately before it sends the
            heartbeat.
        on_broken: A function that the sender thread calls once if the channel breaks.
    """

    def __init__(self, channel: Channel, make_beat: Callable[[], bytes], on_broken: Callable[[OSError], None]) -> None:
        self._channel = channel
        self._make_heartbeat = make_beat
        self._on_broken = on_broken
        self._changed = threading.Condition()
        self._frames: deque[bytes] = deque()
        self._queued = 0
        self._beat_due = False
        self._closed = False

    def start(self, name: str) -> None:
        """Start the sender thread."""
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, frame: bytes) -> None:
        """Add `frame` to the queue without waiting."""
        with self._changed:
            self._add(frame)

    def put_bulk(self, frame: bytes) -> None:
        """Wait until the queue has room, then add `frame`. After `close`, return at once and drop the frame."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queued < _BULK_QUEUE_BYTES)
            self._add(frame)

    def send_heartbeat(self) -> None:
        """Send a heartbeat before all queued frames."""
        with self._changed:
            self._beat_due = True
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all queued frames. The thread ends as soon as its current call of the channel returns."""
        with self._changed:
            self._closed = True
            self._frames.clear()
            self._changed.notify_all()

    def _add(self, frame: bytes) -> None:
        if not self._closed:
            self._frames.append(frame)
            self._queued += len(frame)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (frame := self._next()) is not None:
                self._channel.send(frame)
        except OSError as error:
            self._on_broken(error)

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._beat_due or self._frames)
            if self._closed:
                return None
            if not self._beat_due:
                frame = self._frames.popleft()
                self._queued -= len(frame)
                self._changed.notify_all()
                return frame
            self._beat_due = False
        return self._make_heartbeat()
