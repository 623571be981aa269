"""Dataclasses from the JSON objects of a peer: fields may be unknown, but none may be missing."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from clusterctl.agent.protocol.frames import FrameError

T = TypeVar("T")


@cache
def _names(cls: type) -> frozenset[str]:
    # Cached, because it is called for every line of a journal.
    return frozenset(f.name for f in fields(cls))


def parse_dataclass(cls: type[T], value: dict[str, Any]) -> T:
    """Return a dataclass from the JSON object of a peer; unknown fields are ignored.

    Raises:
        FrameError: A required field is missing.
    """
    names = _names(cls)  # type: ignore[arg-type]
    try:
        return cls(**{name: value[name] for name in names if name in value})
    except TypeError as error:
        raise FrameError(f"{cls.__name__}: {error}") from error
