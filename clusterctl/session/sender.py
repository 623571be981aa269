"""What goes out on one connection: frames in the order given, from a thread of its own.

A request, a sign of life or credit never waits for a slow node; only who sends bulk does.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.transport.base import Channel

_QUEUE_BYTES = 256 * 1024
"""Bulk that may wait: enough to keep a fast link busy, little enough for a request not to stand behind it for long."""


class Sender:
    """Writes frames to a channel until `close`. What has not been handed to the channel by then never is.

    Args:
        channel: Where they go.
        beat: Makes a sign of life; called on the sending thread right before it leaves.
        broken: Called once, on that thread, where the channel breaks.
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
        """Begin to send, on a thread of that name."""
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, frame: bytes) -> None:
        """Send `frame` after all that was given before; return at once."""
        with self._changed:
            self._add(frame)

    def put_bulk(self, frame: bytes) -> None:
        """Send `frame` after all that was given before; return once it has a place in the queue, or after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queued < _QUEUE_BYTES)
            self._add(frame)

    def beat(self) -> None:
        """Give a sign of life before anything else that waits."""
        with self._changed:
            self._beat_due = True
            self._changed.notify_all()

    def close(self) -> None:
        """Forget what waits and end the thread, once the channel lets it go."""
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
