"""Sends frames over one connection, in order, on a thread of its own.

Requests, heartbeats and credit never wait for a slow node; only bulk data does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from clusterctl.transport.base import Channel

_BULK_QUEUE_BYTES = 256 * 1024
"""How much bulk data may wait: enough to keep a fast link busy, little enough that a request does not wait for long."""


class Sender:
    """Writes frames to a channel until `close`, which drops every frame that the channel does not have yet.

    Args:
        channel: The connection.
        beat: Creates a heartbeat; called on the sender thread right before it is sent.
        broken: Called once on the sender thread if the channel breaks.
    """

    def __init__(self, channel: Channel, beat: Callable[[], bytes], broken: Callable[[OSError], None]) -> None:
        self._channel = channel
        self._make_beat = beat
        self._broken = broken
        self._changed = threading.Condition()
        self._frames: deque[bytes] = deque()
        self._queued = 0
        self._beat_due = False
        self._closed = False

    def start(self, name: str) -> None:
        """Start the sender thread."""
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, frame: bytes) -> None:
        """Queue `frame`; return at once."""
        with self._changed:
            self._add(frame)

    def put_bulk(self, frame: bytes) -> None:
        """Queue `frame`; return once it has a place in the queue, or after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queued < _BULK_QUEUE_BYTES)
            self._add(frame)

    def send_heartbeat(self) -> None:
        """Send a heartbeat before all queued frames."""
        with self._changed:
            self._beat_due = True
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all queued frames and end the thread as soon as the channel returns."""
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
            self._broken(error)

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
        return self._make_beat()
