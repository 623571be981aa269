"""Encodes and decodes the list of the files of a sync or copy."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.command_messages import ErrorKind, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

LINK_MODE = 0o120777
"""The mode of a symbolic link in a file list. The target of the link, a path inside the folder, is the content of
the entry.
"""

FOLDER_MODE = 0o040777
"""The mode of an empty folder in a file list, whose size is 0 and whose hash is that of no bytes. A sync does not
remove the files of this folder on a node.
"""


def encode_file_list(entries: Iterable[tuple[str, int, int, str]]) -> bytes:
    """Return the compressed JSON of a file list: path, size, permission bits and SHA-256 of each file.

    Later messages name a file by its index in the list. The list may be larger than a frame: a hundred thousand files
    take 16 MB of JSON.
    """
    text = json.dumps(list(entries), separators=(",", ":"), ensure_ascii=False)
    # A higher level would gain little: half of the list are hashes, which cannot be compressed.
    return zlib.compress(text.encode("utf-8", "surrogateescape"), 1)


def decode_file_list(data: bytes) -> list[list[Any]]:
    """Return the entries of an encoded file list.

    Raises:
        RequestError: The bytes are not a file list.
    """
    try:
        entries = json.loads(zlib.decompress(data).decode("utf-8", "surrogateescape"))
        return [[str(path), int(size), int(mode), str(digest)] for path, size, mode, digest in entries]
    except (zlib.error, ValueError, TypeError) as error:
        raise RequestError(ErrorKind.BAD_REQUEST, f"not a list of files: {error}") from error
