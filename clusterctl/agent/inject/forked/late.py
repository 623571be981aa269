"""Environment and arguments while modules are imported: who reads what only the rank has is found out."""

from __future__ import annotations

import os
import sys

from .cannot import CannotForkError

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


class _Watched(dict):  # type: ignore[type-arg]
    """The values behind `os.environ`; notes which of some names are asked for."""

    def __init__(self, values: dict[bytes, bytes], names: Iterable[bytes]) -> None:
        super().__init__(values)
        self.names = frozenset(names)
        self.asked: list[bytes] = []

    def __getitem__(self, name: bytes) -> bytes:  # type: ignore[explicit-override]
        if name in self.names:
            self.asked.append(name)
        return super().__getitem__(name)  # type: ignore[no-any-return]


class _Words(list):  # type: ignore[type-arg]
    """The arguments in `sys.argv`; notes whether they are looked at."""

    seen = False

    def __getitem__(self, place: Any) -> Any:  # type: ignore[explicit-override]
        self.seen = True
        return super().__getitem__(place)

    def __iter__(self) -> Any:  # type: ignore[explicit-override]
        self.seen = True
        return super().__iter__()

    def __len__(self) -> int:  # type: ignore[explicit-override]
        self.seen = True
        return super().__len__()

    def __contains__(self, word: object) -> bool:  # type: ignore[explicit-override]
        self.seen = True
        return super().__contains__(word)


def watch_arguments() -> _Words:
    """Note from now on whether somebody looks at the arguments."""
    words = _Words(sys.argv)
    sys.argv = words
    return words


def end_arguments(words: _Words) -> bool:
    """Note no longer; return whether anybody has looked at them, or put others in their place."""
    seen, changed = words.seen, sys.argv is not words
    sys.argv = list(sys.argv)
    return seen or changed


def watch(names: Iterable[str]) -> _Watched:
    """Note from now on who asks for one of these variables."""
    environ: Any = os.environ
    watched = _Watched(environ._data, [os.fsencode(name) for name in names])  # noqa: SLF001
    _put(watched)
    return watched


def end(watched: _Watched, changes: Iterable[str]) -> list[str]:
    """Note no longer; return which of `changes` somebody has asked for: in another run the answer would be another.

    Raises:
        CannotForkError: Somebody has asked for another: in a rank the answer would have been another.
    """
    _put(dict(watched))
    asked = {os.fsdecode(name) for name in watched.asked}
    of_a_rank = sorted(asked.difference(changes))
    if of_a_rank:
        raise CannotForkError(
            f"what was imported has read {', '.join(of_a_rank)}, whose value each rank gets at its start"
        )
    return sorted(asked)


def _put(values: dict[bytes, bytes]) -> None:
    for environ in (os.environ, os.environb):
        setattr(environ, "_data", values)  # noqa: B010 - typeshed knows nothing of it


def set_since(before: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return what was set since then."""
    return {name: value for name, value in os.environb.items() if before.get(name) != value}


def replace(values: dict[bytes, bytes]) -> None:
    """Set the whole environment of this process, that of its C libraries too."""
    os.environb.clear()
    for name, value in values.items():
        os.environb[name] = value
