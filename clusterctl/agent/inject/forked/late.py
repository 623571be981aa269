"""Environment and arguments while modules are imported: who reads what only the rank has is found out."""

from __future__ import annotations

import os
import sys
import weakref

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
    """Arguments; notes whether they are looked at, in whatever way."""

    seen = False


def _noting(name: str) -> Any:
    usual = getattr(list, name)

    def noting(self: _Words, *arguments: Any, **more: Any) -> Any:
        self.seen = True
        return usual(self, *arguments, **more)

    return noting


for _name, _usual in vars(list).items():
    # All that a list can do, less what it takes to make one, and what Python itself asks of any object.
    if callable(_usual) and _name not in ("__new__", "__init__", "__getattribute__", "__class_getitem__"):
        setattr(_Words, _name, _noting(_name))

_LISTS = tuple(name for name in ("argv", "orig_argv") if hasattr(sys, name))


def watch_arguments() -> list[weakref.ref[_Words]]:
    """Note from now on whether somebody looks at the arguments."""
    for name in _LISTS:
        setattr(sys, name, _Words(getattr(sys, name)))
    return [weakref.ref(getattr(sys, name)) for name in _LISTS]


def end_arguments(watched: Iterable[weakref.ref[_Words]]) -> bool:
    """Note no longer; return whether anybody has looked at them, keeps them, or has put others in their place."""
    seen = False
    for name, watch in zip(_LISTS, watched):
        words = watch()
        seen |= words is None or words.seen or getattr(sys, name) is not words
        setattr(sys, name, list(getattr(sys, name)))
        del words
        # Whoever still has them looks later: `from sys import argv`.
        seen |= watch() is not None
    return seen


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


def of_text(values: dict[str, str]) -> dict[bytes, bytes]:
    """Return variables of a request as the kernel has them, whatever encoding the user's Python goes by."""
    how = ("utf-8", "surrogateescape")
    return {name.encode(*how): value.encode(*how) for name, value in values.items()}


def replace(values: dict[bytes, bytes]) -> None:
    """Set the whole environment of this process, that of its C libraries too."""
    os.environb.clear()
    for name, value in values.items():
        os.environb[name] = value
