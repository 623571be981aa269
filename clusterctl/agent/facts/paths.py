"""Reading small files of the kernel below a root prefix."""

from __future__ import annotations

import os


def under(root: str, path: str) -> str:
    """Return an absolute `path` as it lies below `root`."""
    return path if root == "/" else root.rstrip("/") + path


def text(root: str, path: str) -> str | None:
    """Return a file's text without the white space around it, or `None` where it cannot be read."""
    try:
        with open(under(root, path), encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def number(root: str, path: str) -> int | None:
    """Return a file's leading integer (decimal or 0x), or `None`."""
    content = text(root, path)
    if not content:
        return None
    try:
        return int(content.split()[0], 0)
    except ValueError:
        return None


def names(root: str, path: str) -> list[str]:
    """Return the names in a directory, sorted; none where it cannot be read."""
    try:
        return sorted(os.listdir(under(root, path)))
    except OSError:
        return []
