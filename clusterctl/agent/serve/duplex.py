"""A stream that goes both ways: from a descriptor to the controller, and back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.commands import WINDOW_BYTES
from clusterctl.agent.protocol.frames import CHUNK_BYTES, FrameError

if TYPE_CHECKING:
    from typing import Callable

    from clusterctl.agent.linux.channel import Channel
    from clusterctl.agent.linux.loop import Loop
    from clusterctl.agent.protocol.frames import StreamData


class Duplex:
    """One descriptor, of a terminal or of a connection. Neither side holds more than a window of the other's bytes.

    Args:
        number: Of the stream.
        fd: Is closed by `close`.
        shut: Tells whoever reads from the descriptor that no more comes.
        changed: Called when one way has come to its end: `done` or `over` is true then.

    Attributes:
        done: The descriptor has given its last byte, and that was sent.
    """

    def __init__(
        self,
        loop: Loop,
        channel: Channel,
        number: int,
        fd: int,
        shut: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._loop, self._channel, self._number, self._fd = loop, channel, number, fd
        self._shut, self._changed = shut, changed
        self._offset, self._room = 0, WINDOW_BYTES
        self._waiting, self._untold = bytearray(), 0
        self._last = self._broken = self.done = False
        os.set_blocking(fd, False)
        loop.on_readable(fd, self._read)

    @property
    def held_back(self) -> bool:
        """The controller takes nothing more for now."""
        return self._room <= 0

    @property
    def over(self) -> bool:
        """Both ways have come to their end."""
        return self.done and (self._broken or (self._last and not self._waiting))

    # --- to the controller

    def _read(self) -> None:
        if self._room <= 0:
            self._loop.on_readable(self._fd, None)
            return
        try:
            data = os.read(self._fd, min(CHUNK_BYTES, self._room))
        except BlockingIOError:
            return
        except OSError:
            data = b""  # A terminal that nobody has open any more says EIO.
        self._channel.send_data(self._number, self._offset, data)
        self._offset += len(data)
        self._room -= len(data)
        if not data:
            self.done = True
            self._loop.on_readable(self._fd, None)
            self._changed()

    def taken(self, count: int) -> None:
        """Let the controller have so many bytes more."""
        self._room += count
        if self._room > 0 and not self.done and self._fd >= 0:
            self._loop.on_readable(self._fd, self._read)

    # --- from the controller

    def take(self, data: StreamData) -> None:
        """Give bytes to the descriptor; none at all are the end of them.

        Raises:
            FrameError: They are more than the window lets through.
        """
        if self._fd < 0 or self._last:
            return
        if not data.payload:
            self._last = True
        self._waiting += data.payload
        if len(self._waiting) > WINDOW_BYTES:
            raise FrameError(f"stream {self._number}: more than was taken")
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting and not self._broken:
                count = os.write(self._fd, self._waiting[:CHUNK_BYTES])
                del self._waiting[:count]
                self._untold += count
        except BlockingIOError:
            pass
        except OSError:
            # Nobody reads there any more; what still comes is swallowed, so that the controller does not wait.
            self._broken = True
        if self._broken:
            self._untold += len(self._waiting)
            self._waiting.clear()
        if self._untold and (not self._waiting or self._untold >= WINDOW_BYTES // 8):
            self._channel.send({"push": "taken", "stream": self._number, "bytes": self._untold})
            self._untold = 0
        self._loop.on_writable(self._fd, self._write if self._waiting else None)
        if self._last and not self._waiting:
            self._shut()
            self._changed()

    def close(self) -> None:
        """Close the descriptor; may be repeated."""
        if self._fd >= 0:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = -1
