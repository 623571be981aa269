"""Our end of a stream that goes both ways: a terminal on a node, or a connection there."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.commands import WINDOW_BYTES, Command
from clusterctl.agent.protocol.frames import Data, FrameError

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.session.streams import Streams

_TOLD_BYTES = WINDOW_BYTES // 8


class Duplex:
    """Bytes both ways, on each at most a window more than the other side has taken.

    One thread uses it; what comes is put down by the session's reading thread, which never waits for that one.

    Attributes:
        number: Of the stream.
        room: Bytes that may be sent now.
    """

    def __init__(
        self,
        streams: Streams,
        send: Callable[[int, int, bytes], None],
        post: Callable[..., None],
        wake: Callable[[], None],
    ) -> None:
        self._streams, self._send, self._post, self._wake = streams, send, post, wake
        self._lock = threading.Lock()
        self._arrived: deque[bytes] = deque()
        self._window, self._untold = WINDOW_BYTES, 0
        self._offset, self.room = 0, WINDOW_BYTES
        self.number = streams.both_ways(self._take, self._granted)

    # --- on the reading thread

    def _take(self, data: Data) -> None:
        with self._lock:
            self._window -= len(data.payload)
            if self._window < 0:
                raise FrameError(f"stream {self.number}: {-self._window} bytes beyond what was taken")
            self._arrived.append(data.payload)
        self._wake()

    def _granted(self, count: int) -> None:
        with self._lock:
            self.room += count
            if self.room > WINDOW_BYTES:
                raise FrameError(f"stream {self.number}: more was taken than was sent")
        self._wake()

    # --- on the thread that uses it

    def read(self) -> bytes | None:
        """Return bytes that have come, `b""` for the end of them, `None` where there are none now."""
        with self._lock:
            return self._arrived.popleft() if self._arrived else None

    def taken(self, count: int) -> None:
        """Say that so many bytes are where they were to go, so that as many more may come."""
        with self._lock:
            self._window += count
            self._untold += count
            told = self._untold if self._untold >= _TOLD_BYTES or not self._arrived else 0
            self._untold -= told
        if told:
            self._post(Command.TAKEN, {"stream": self.number, "bytes": told})

    def send(self, data: bytes) -> None:
        """Send at most `room` bytes; none at all say that no more follow.

        Raises:
            NodeError: The session is lost.
        """
        with self._lock:
            self.room -= len(data)
        self._send(self.number, self._offset, data)
        self._offset += len(data)

    def forget(self) -> None:
        """Have nothing more to do with it."""
        self._streams.forget(self.number)
