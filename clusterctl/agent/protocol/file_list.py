"""The files of a manifest as they travel: all in one order, which both sides then go by, and compressed.

A tree of a hundred thousand files is 16 MB of JSON, more than a frame holds, and the same for every node.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import request_errors
from clusterctl.agent.protocol.commands import ErrorKind

if TYPE_CHECKING:
    from collections.abc import Iterable

LINK_MODE = 0o120777
"""What a symbolic link has in place of permission bits; its content is where it leads, inside the folder."""

_LEVEL = 1
"""Half of it are hashes, which no effort makes smaller."""


def encode_file_list(entries: Iterable[tuple[str, int, int, str]]) -> bytes:
    """Return what goes into the stream of a `manifest`: path, size, permission bits and SHA-256 of each file."""
    text = json.dumps(list(entries), separators=(",", ":"), ensure_ascii=False)
    return zlib.compress(text.encode("utf-8", "surrogateescape"), _LEVEL)


def decode_file_list(data: bytes) -> list[list[Any]]:
    """Return the entries that `encode` was given.

    Raises:
        RequestError: It is something else.
    """
    try:
        entries = json.loads(zlib.decompress(data).decode("utf-8", "surrogateescape"))
        return [[str(path), int(size), int(mode), str(digest)] for path, size, mode, digest in entries]
    except (zlib.error, ValueError, TypeError) as error:
        raise request_errors.RequestError(ErrorKind.BAD_REQUEST, f"not a list of files: {error}") from error
