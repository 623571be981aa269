"""Files of this machine that a person named on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

from clusterctl.errors import NotFoundError, RefusedError


def read(path: str) -> str:
    """Return the text of a file; `-` is stdin.

    Raises:
        NotFoundError: It cannot be read.
    """
    try:
        return sys.stdin.read() if path == "-" else Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RefusedError(f"{path} is not a text file") from error


def write(path: str | Path, text: str) -> None:
    """Write a text file.

    Raises:
        RefusedError: It cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error.strerror or error}") from error
