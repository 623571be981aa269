"""What somebody gives a command on its standard input."""

from __future__ import annotations

import os
import select
import stat
from typing import TYPE_CHECKING

from clusterctl.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BYTES = 2 << 20
"""The longest input: however its bytes are written down, it fits into one message to a node."""
_PATIENCE, _LONGEST = 2.0, 60.0
"""Seconds of silence after which a word is said, and after which nothing more is waited for."""
_WAITING = "waiting for the end of standard input; `< /dev/null` gives none"


def piped(fd: int, tell: Callable[[str], None], *, patience: float = _PATIENCE, longest: float = _LONGEST) -> bytes:
    """Return all that is piped into this process, or the file that is its input; nothing of a terminal or a device.

    Args:
        fd: The standard input.
        tell: Takes a word where its end is waited for.
        patience: Seconds of silence after which that is said.
        longest: Seconds of silence more after which it is given up: whoever started us left a pipe open.

    Raises:
        RefusedError: It is too long, or does not end.
    """
    try:
        kind = os.fstat(fd).st_mode
    except OSError:
        return b""  # closed
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        return b""
    told, given = False, bytearray()
    while True:
        if not _readable(fd, patience):
            if not told:
                told = True
                tell(_WAITING)
            if not _readable(fd, longest):
                raise RefusedError("standard input does not end", hint="`< /dev/null` gives the command none")
        piece = os.read(fd, 1 << 16)
        if not piece:
            return bytes(given)
        given += piece
        if len(given) > MAX_BYTES:
            hint = "`clusterctl sync` brings files to the nodes"
            raise RefusedError(f"standard input is longer than {MAX_BYTES >> 20} MiB", hint=hint)


def _readable(fd: int, seconds: float) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])
