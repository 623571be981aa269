"""Writes files of the status directory.

This module encodes JSON itself, because the import of `json` would slow down the start of a worker.
"""

from __future__ import annotations

import os


def encode_json(value: object) -> str:
    """Return ASCII JSON of dicts, lists, tuples, strings, numbers, booleans and `None`.

    Any other value is written as `str(value)`. A text is cut to 200 characters.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        finite = value == value and value not in (float("inf"), float("-inf"))  # noqa: PLR0124  (NaN)
        return float.__repr__(value) if finite else "null"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_encode_text(str(key))}:{encode_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(encode_json(item) for item in value) + "]"
    return _encode_text(str(value))


def _encode_text(text: str) -> str:
    plain = text[:200]
    if not (plain.isascii() and plain.isprintable() and '"' not in plain and "\\" not in plain):
        units = plain.encode("utf-16-be", "surrogatepass")
        plain = "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    return f'"{plain}"'


def replace_file(path: str, content: str) -> None:
    """Write a file atomically.

    Raises:
        OSError: The file cannot be written. The temporary file is removed.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w", encoding="ascii") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def create_file(path: str) -> None:
    """Create a file if it does not exist. Errors are ignored."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError:
        return


def remove_file(path: str) -> None:
    """Remove a file if it exists."""
    if os.path.exists(path):
        os.unlink(path)
