"""The environment while modules are imported: who reads a variable whose value only the rank has is found out."""

from __future__ import annotations

import os

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
