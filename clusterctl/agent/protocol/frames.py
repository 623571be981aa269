"""Encodes and decodes frames, the units of every connection between head and node.

A frame has a header of 5 bytes (length of the body, kind of the frame) and a body. The body of a message is one JSON
object. The body of data is a stream number, an offset and raw bytes.
"""

from __future__ import annotations

import json
import struct

from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, Callable, Union

    Message = dict[str, Any]
    """The JSON object of a message; `command_payload_types` has the types of the messages."""
    Frame = Union[Message, "StreamData"]


INITIAL_CREDIT_BYTES = 512 * 1024

MAX_FRAME_BYTES = 16 * 1024 * 1024

MAX_MESSAGE_VALUES = 1 << 21
"""The maximum number of JSON values in one message. A decoded value takes many times the memory of its JSON text."""

CHUNK_BYTES = 64 * 1024

_HEADER = struct.Struct(">IB")

_DATA = struct.Struct(">IQ")

_MESSAGE_KIND = 0

_DATA_KIND = 1


@frozen_dataclass(frozen=True)
class StreamData:
    """Raw bytes of a stream that begin at `offset`."""

    stream: int
    offset: int
    payload: bytes


class FrameError(ValueError):
    """The peer has sent bytes that are not a valid frame."""


class FrameTooLargeError(ValueError):
    """The message is larger than a frame may be, so the peer would refuse the message."""


def encode_message(message: Mapping[str, object]) -> bytes:
    """Return the frame of a JSON message.

    Raises:
        FrameTooLargeError: The body of the frame would be larger than `MAX_FRAME_BYTES`.
    """
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogateescape")
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLargeError(
            f"the message has {len(body) / 2**20:.1f} MiB and may have at most {MAX_FRAME_BYTES >> 20} MiB"
        )
    return _HEADER.pack(len(body), _MESSAGE_KIND) + body


def encode_data(stream: int, offset: int, payload: bytes) -> bytes:
    """Return the frame with bytes of a stream, which begin at `offset`."""
    return _HEADER.pack(_DATA.size + len(payload), _DATA_KIND) + _DATA.pack(stream, offset) + payload


class FrameDecoder:
    """Splits a byte stream into frames.

    Args:
        max_message_bytes: A function that returns the present maximum size of a message. With `None`, the maximum size
            of a frame applies.

    Attributes:
        last_frame_bytes: The size of the body of the last frame.
    """

    def __init__(self, max_message_bytes: Callable[[], int] | None = None) -> None:
        self._buffer = bytearray()
        self._max_message_bytes = max_message_bytes
        self.last_frame_bytes = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add `data` to the buffer, and yield each complete frame.

        Raises:
            FrameError: The bytes are not frames (foreign output after the preamble), or a frame is too large.
        """
        self._buffer += data
        position = 0
        while len(self._buffer) - position >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self._buffer, position)
            if kind not in (_MESSAGE_KIND, _DATA_KIND) or length > MAX_FRAME_BYTES:
                raise FrameError(f"not a frame: {bytes(self._buffer[position : position + 80])!r}")
            if self._max_message_bytes is not None and kind == _MESSAGE_KIND and length > self._max_message_bytes():
                raise FrameError(f"a message of {length} bytes; the present maximum is {self._max_message_bytes()}")
            end = position + _HEADER.size + length
            if end > len(self._buffer):
                break
            body = bytes(memoryview(self._buffer)[position + _HEADER.size : end])
            position = end
            self.last_frame_bytes = length
            yield _decode(kind, body)
        del self._buffer[:position]


def _decode(kind: int, body: bytes) -> Frame:
    if kind == _DATA_KIND:
        if len(body) < _DATA.size:
            raise FrameError(f"data without a stream: {body!r}")
        stream, offset = _DATA.unpack_from(body)
        return StreamData(stream, offset, body[_DATA.size :])
    if len(body) > MAX_MESSAGE_VALUES and sum(body.count(mark) for mark in (b",", b"[", b"{")) > MAX_MESSAGE_VALUES:
        raise FrameError(f"a message with over {MAX_MESSAGE_VALUES} values")
    try:
        message = json.loads(body.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not a message: {body[:80]!r}") from error
    if not isinstance(message, dict):
        raise FrameError(f"not a message: {body[:80]!r}")
    return message
