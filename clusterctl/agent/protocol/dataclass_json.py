"""Values to JSON objects and back: strict with what has to be there, tolerant with what only a newer peer knows."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from clusterctl.agent.protocol.frames import FrameError

T = TypeVar("T")


@cache
def _names(cls: type) -> frozenset[str]:
    # Asked for each line of a journal.
    return frozenset(f.name for f in fields(cls))


def parse_dataclass(cls: type[T], value: dict[str, Any]) -> T:
    """Return a dataclass of flat fields from a peer's object; fields we do not know are left out.

    Raises:
        FrameError: A field that must be there is not.
    """
    names = _names(cls)  # type: ignore[arg-type]
    try:
        return cls(**{name: value[name] for name in names if name in value})
    except TypeError as error:
        raise FrameError(f"{cls.__name__}: {error}") from error
