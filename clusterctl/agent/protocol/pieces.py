"""The pieces of a cast, and the messages about them between peers, and between the head and a peer. Pure.

The distinct contents of the files, one after another, form one sequence of bytes. The sequence is cut into pieces of
`PIECE_BYTES`; the last piece may be shorter. The head makes the SHA-256 of each piece, and a peer trusts no other.

A message has a header of 5 bytes (kind, length of the body) and a body. Every kind has a limit for its body.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from bisect import bisect_right
from enum import IntEnum
from itertools import accumulate
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PIECE_BYTES = 4 << 20
HASH_BYTES = hashlib.sha256().digest_size


class PieceMap:
    """The places of the pieces in a sequence of contents.

    Args:
        sizes: The size of each content in bytes.

    Attributes:
        count: The number of pieces.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._starts = [0, *accumulate(sizes)]
        self.count = -(-self._starts[-1] // PIECE_BYTES)

    def get_length(self, piece: int) -> int:
        """Return the bytes of a piece."""
        return min(PIECE_BYTES, self._starts[-1] - piece * PIECE_BYTES)

    def list_parts(self, piece: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of a piece: the number of a content, the offset in this content, and the length."""
        position, end = piece * PIECE_BYTES, piece * PIECE_BYTES + self.get_length(piece)
        number = bisect_right(self._starts, position) - 1
        while position < end:
            length = min(end, self._starts[number + 1]) - position
            if length:
                yield number, position - self._starts[number], length
            position += length
            number += 1

    def list_pieces(self, content: int) -> range:
        """Return the pieces that contain bytes of a content."""
        start, end = self._starts[content], self._starts[content + 1]
        return range(start // PIECE_BYTES, -(-end // PIECE_BYTES) if end > start else start // PIECE_BYTES)


@frozen_dataclass(frozen=True)
class CastPlan:
    """Everything that a peer knows at its start.

    Attributes:
        cast: The id of the cast.
        contents: SHA-256 and size of each content.
        piece_hashes: The SHA-256 of each piece, in binary.
        certificate, key: The certificate and the private key (PEM) that all peers of this cast have, and no one else.
        address: The address on which the peer listens, or "" if it does not listen.
        limit: The bytes per second that the peer may send, and receive, or `None`.
    """

    cast: str
    contents: list[tuple[str, int]]
    piece_hashes: list[bytes]
    certificate: str
    key: str
    address: str
    limit: int | None

    def encode(self) -> bytes:
        """Return the plan as compressed JSON."""
        fields = {**vars(self), "piece_hashes": b"".join(self.piece_hashes).hex()}
        return zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), 1)

    @staticmethod
    def decode(data: bytes) -> CastPlan:
        """Return the plan in the bytes that `encode` has made."""
        fields = json.loads(zlib.decompress(data))
        hashes = bytes.fromhex(fields["piece_hashes"])
        fields["piece_hashes"] = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        fields["contents"] = [(str(digest), int(length)) for digest, length in fields["contents"]]
        return CastPlan(**fields)


class Kind(IntEnum):
    """The kinds of messages.

    A peer that lacks pieces sends WANT (a piece) and WAIT (for news) to a neighbour. The neighbour answers WANT with
    PIECE, and either request with HAVE: the pieces that it has got since its last HAVE, perhaps none. The head sends
    PEERS (all peers, once), PIECE and END to a peer, and the peer sends HAVE to the head.
    """

    WANT = 1
    WAIT = 2
    HAVE = 3
    PIECE = 4
    PEERS = 5
    END = 6


_HEADER = struct.Struct(">BI")
_NUMBER_BYTES = 4
_MAX_PEERS_BYTES = 4 << 20


def encode_message(kind: Kind, body: bytes = b"") -> bytes:
    """Return a message as bytes."""
    return _HEADER.pack(kind, len(body)) + body


def encode_numbers(kind: Kind, numbers: Iterable[int], data: bytes = b"") -> bytes:
    """Return a message with numbers of pieces, followed by `data`."""
    listed = list(numbers)
    return encode_message(kind, struct.pack(f">{len(listed)}I", *listed) + data)


class MessageDecoder:
    """Splits a stream of bytes into messages, and checks each against its limits.

    Args:
        count: The number of pieces of the cast.
        kinds: The kinds that the other side may send.
    """

    def __init__(self, count: int, kinds: Iterable[Kind]) -> None:
        self._buffer = bytearray()
        self._count = count
        number_bytes = _NUMBER_BYTES * count
        limits = {
            Kind.WANT: (_NUMBER_BYTES, _NUMBER_BYTES),
            Kind.WAIT: (0, 0),
            Kind.HAVE: (0, number_bytes),
            Kind.PIECE: (_NUMBER_BYTES + 1, _NUMBER_BYTES + PIECE_BYTES),
            Kind.PEERS: (2, _MAX_PEERS_BYTES),
            Kind.END: (0, 0),
        }
        self._limits = {kind: limits[kind] for kind in kinds}

    def feed(self, data: bytes) -> Iterator[tuple[Kind, list[int], bytes]]:
        """Add bytes. Yield kind, numbers of pieces and data of each complete message.

        Raises:
            FrameError: The other side has broken the protocol.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._buffer)
            least, most = self._limits.get(number, (1, 0))
            if not least <= length <= most:
                raise FrameError(f"no message of a cast: kind {number} with {length} bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            kind = Kind(number)
            # Only a piece is long, so a piece alone is copied once.
            numbers_end = _HEADER.size + _NUMBER_BYTES if kind is Kind.PIECE else end
            listed = b"" if kind is Kind.PEERS else bytes(self._buffer[_HEADER.size : numbers_end])
            with memoryview(self._buffer) as view:
                data = bytes(view[_HEADER.size + len(listed) : end])
            del self._buffer[:end]
            if len(listed) % _NUMBER_BYTES:
                raise FrameError(f"{len(listed)} bytes are no numbers of pieces")
            numbers = list(struct.unpack(f">{len(listed) // _NUMBER_BYTES}I", listed))
            if any(number >= self._count for number in numbers):
                raise FrameError(f"a piece beyond the {self._count} pieces of the cast")
            yield kind, numbers, data


class RateLimit:
    """Spreads transfers over time, so that a limit holds on average. Pure: the caller waits.

    Args:
        bytes_per_s: The limit, or `None`.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def spend(self, count: int, now: float) -> float:
        """Record a transfer of `count` bytes. Return the seconds to wait before it."""
        if self._bytes_per_s is None:
            return 0.0
        began = max(now, self._free_at)
        self._free_at = began + count / self._bytes_per_s
        return began - now
