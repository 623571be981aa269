"""The streams of a session: those that our requests name, and the files that the agent announces."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.commands import WINDOW_BYTES, Command
from clusterctl.agent.protocol.frames import FrameError, StreamData
from clusterctl.agent.protocol.run_files import parse_attempt

if TYPE_CHECKING:
    from collections.abc import Callable


if TYPE_CHECKING:
    Listener = Callable[[StreamData], None]


class Streams:
    """The streams of one session. Any thread may allocate; only the reader thread announces and looks up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._named = 0
        self._listeners: dict[int, Listener] = {}
        self._files: dict[int, tuple[str, str]] = {}
        self._granted: dict[int, Callable[[int], None]] = {}

    @property
    def announced(self) -> int:
        """How many announced files may still grow."""
        return len(self._files)

    def allocate(self, listener: Listener | None, count: int) -> int:
        """Allocate `count` numbers in a row for one listener and return the first."""
        with self._lock:
            numbers = [next(self._numbers) for _ in range(count)]
            self._named = numbers[-1]
            if listener is not None:
                self._listeners.update(dict.fromkeys(numbers, listener))
        return numbers[0]

    def open_duplex(self, listener: Listener, granted: Callable[[int], None]) -> int:
        """Allocate the number of a two-way stream; `granted` is called with how many bytes we may send."""
        number = self.allocate(listener, 1)
        self._granted[number] = granted
        return number

    def taken(self, number: int, count: int) -> None:
        """Pass on that the node has taken `count` bytes of a stream. Ignored for closed streams.

        Raises:
            FrameError: We did not send that many bytes in this stream.
        """
        granted = self._granted.get(number)
        if granted is not None:
            granted(count)

    def forget(self, number: int) -> None:
        """Close a stream of ours; data that still comes in it is dropped."""
        with self._lock:
            self._listeners[number] = _swallow
        self._granted.pop(number, None)

    def listener(self, number: int) -> Listener | None:
        """Return the listener of a stream of ours; `None` if its data goes into the inbox.

        Raises:
            FrameError: No request named this stream.
        """
        if not 0 < number <= self._named:
            raise FrameError(f"data of stream {number}, which nobody has named")
        return self._listeners.get(number)

    def announce(self, number: int, run: str, file: str) -> None:
        """Record which file a stream of the agent carries."""
        self._files[number] = (run, file)

    def file(self, number: int) -> tuple[str, str]:
        """Return run and file of a stream of the agent.

        Raises:
            FrameError: The agent never announced this stream.
        """
        if number not in self._files:
            raise FrameError(f"data of stream {number}, which was never announced")
        return self._files[number]

    def end_before(self, run: str, attempt: int) -> None:
        """Forget the files of a run's attempts below `attempt`: they do not grow any more."""
        self._files = {
            number: (whose, file)
            for number, (whose, file) in self._files.items()
            if whose != run or not -1 < parse_attempt(file) < attempt
        }


def _swallow(_data: StreamData) -> None:
    pass


_ACKNOWLEDGE_BYTES = WINDOW_BYTES // 8


class Duplex:
    """A stream in both directions with flow control: each side may be one window ahead of the other.

    One thread uses it. The reader thread of the session adds data and never waits for that thread.

    Attributes:
        number: Number of the stream.
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
        self._window, self._unacknowledged = WINDOW_BYTES, 0
        self._offset, self.room = 0, WINDOW_BYTES
        self.number = streams.open_duplex(self._take, self._granted)

    # --- on the reading thread

    def _take(self, data: StreamData) -> None:
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
        """Return received bytes, `b""` at the end of the stream, `None` if there are none now."""
        with self._lock:
            return self._arrived.popleft() if self._arrived else None

    def taken(self, count: int) -> None:
        """Acknowledge `count` bytes, so that the node may send as many more."""
        with self._lock:
            self._window += count
            self._unacknowledged += count
            acknowledged = (
                self._unacknowledged if self._unacknowledged >= _ACKNOWLEDGE_BYTES or not self._arrived else 0
            )
            self._unacknowledged -= acknowledged
        if acknowledged:
            self._post(Command.TAKEN, {"stream": self.number, "bytes": acknowledged})

    def send(self, data: bytes) -> None:
        """Send at most `room` bytes. An empty payload ends our side.

        Raises:
            NodeError: The session is lost.
        """
        with self._lock:
            self.room -= len(data)
        self._send(self.number, self._offset, data)
        self._offset += len(data)

    def forget(self) -> None:
        """Close the stream."""
        self._streams.forget(self.number)
