"""The file list of a manifest, in a fixed order that both sides refer to, and compressed.

A hundred thousand files take 16 MB of JSON, which is more than a frame holds. The list is the same for all nodes.
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
"""The mode of a symbolic link in a list; the content of the link is its target, inside the folder."""

FOLDER_MODE = 0o040777
"""The mode of an empty folder in a list; its size is 0, and its hash that of nothing. Whatever is in it may stay."""

_LEVEL = 1
"""Half of the list are hashes, which no level compresses."""


def encode_file_list(entries: Iterable[tuple[str, int, int, str]]) -> bytes:
    """Return the bytes of a file list: path, size, permission bits and SHA-256 of each file."""
    text = json.dumps(list(entries), separators=(",", ":"), ensure_ascii=False)
    return zlib.compress(text.encode("utf-8", "surrogateescape"), _LEVEL)


def decode_file_list(data: bytes) -> list[list[Any]]:
    """Return the entries of an encoded file list.

    Raises:
        RequestError: The bytes are not a file list.
    """
    try:
        entries = json.loads(zlib.decompress(data).decode("utf-8", "surrogateescape"))
        return [[str(path), int(size), int(mode), str(digest)] for path, size, mode, digest in entries]
    except (zlib.error, ValueError, TypeError) as error:
        raise request_errors.RequestError(ErrorKind.BAD_REQUEST, f"not a list of files: {error}") from error
