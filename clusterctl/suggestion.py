"""Suggestions for mistyped words and file names."""

from __future__ import annotations

import os
from collections.abc import Iterable


def find_similar(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar candidate, or `None` if no candidate is similar enough."""
    import difflib  # `clusterctl --help` imports this module

    return next(iter(difflib.get_close_matches(word, list(candidates), 1, cutoff)), None)


def find_similar_file(path: str) -> str | None:
    """Return the file with the most similar name in the folder of a missing path, or `None`."""
    folder, name = os.path.split(path)
    try:
        names = [entry.name for entry in os.scandir(os.path.expanduser(folder) or ".") if entry.is_file()]
    except OSError:
        return None
    found = find_similar(name, names)
    return None if found is None else os.path.join(folder, found)


def suggest_similar_file(path: str) -> str | None:
    """Return a hint that names the most similar file, or `None`."""
    found = find_similar_file(path)
    return None if found is None else f"did you mean `{found}`?"
