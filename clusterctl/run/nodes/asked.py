"""Which names a pattern asks for: what a node sends unasked is not written, whatever the node says that it matches."""

from __future__ import annotations

import posixpath
from fnmatch import fnmatchcase

_ANY_DEPTH = "**"


def asked_for(pattern: str, name: str) -> bool:
    """Return whether a file is one that a pattern means, by the rules of `glob`: it matches, or a folder above it does.

    As for a shell, `*`, `?` and `**` mean no hidden names; in a folder that matches, all files are meant.

    Args:
        pattern: Relative; `**` stands for folders of any depth.
        name: A relative path without `.` and `..`.
    """
    wanted = posixpath.normpath(pattern).split("/")
    # A pattern that means the folder itself, `**`, means what is in it, which its parts decide.
    reached = _passing(wanted, {0}) - {len(wanted)}
    for part in name.split("/"):
        reached = _passing(wanted, {at + step for at in reached for step in _steps(wanted[at], part)})
        if len(wanted) in reached:
            return True
        if not reached:
            return False
    return False


def _steps(wanted: str, part: str) -> tuple[int, ...]:
    """Return by how many parts a pattern goes on with one part of a name; none where that does not match."""
    if part.startswith(".") and not wanted.startswith("."):
        return ()
    if wanted == _ANY_DEPTH:
        return (0,)
    return (1,) if fnmatchcase(part, wanted) else ()


def _passing(wanted: list[str], reached: set[int]) -> set[int]:
    """Add what is reached where `**` stands for no folder at all."""
    found = set(reached)
    for at, part in enumerate(wanted):
        if at in found and part == _ANY_DEPTH:
            found.add(at + 1)
    return found
