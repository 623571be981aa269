"""Frames over a pair of descriptors that never block the loop."""

from __future__ import annotations

import contextlib
import os

from clusterctl.agent.protocol import frames

# Not from `typing`, whose import would be a good part of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Callable

    from clusterctl.agent.linux.loop import Loop

_READ = 256 * 1024


class Channel:
    """Reads frames from one descriptor, writes frames to another (which may be the same), closes both at the end.

    Attributes:
        queued: Bytes that wait to be written.
    """

    def __init__(
        self,
        loop: Loop,
        read: int,
        write: int,
        on_frame: Callable[[frames.Frame], None],
        on_close: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._read, self._write = read, write
        self._on_frame, self._on_close = on_frame, on_close
        self._decoder = frames.FrameDecoder()
        self._out: list[bytes] = []
        self.queued = 0
        self._open = True
        for fd in {read, write}:
            os.set_blocking(fd, False)
        loop.on_readable(read, self._readable)

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message; it never waits."""
        self._push(frames.encode_message(message))

    def send_data(self, stream: int, offset: int, payload: bytes) -> None:
        """Send bytes of a stream."""
        self._push(frames.encode_data(stream, offset, payload))

    def _push(self, frame: bytes) -> None:
        if not self._open:
            return
        self._out.append(frame)
        self.queued += len(frame)
        if len(self._out) == 1:
            self._writable()

    def _writable(self) -> None:
        try:
            while self._out:
                sent = os.write(self._write, self._out[0])
                self.queued -= sent
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                else:
                    self._out.pop(0)
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(str(error))
            return
        self._loop.on_writable(self._write, self._writable if self._out else None)

    def _readable(self) -> None:
        try:
            data = os.read(self._read, _READ)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
            return
        if not data:
            self.close("")
            return
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
                if not self._open:
                    return
        except frames.FrameError as error:
            self.close(str(error))

    def flush(self) -> None:
        """Write what is queued, waiting for the peer where it is slow; for the last words before an end."""
        with contextlib.suppress(OSError):
            os.set_blocking(self._write, True)
            while self._out:
                frame = self._out.pop(0)
                while frame:
                    frame = frame[os.write(self._write, frame) :]

    def close(self, why: str) -> None:
        """Close both descriptors and say why, once."""
        if not self._open:
            return
        self._open = False
        self._out.clear()
        for fd in {self._read, self._write}:
            self._loop.forget(fd)
            os.close(fd)
        self._on_close(why)
