"""Lists of hosts that others write: a host a line, with what is said of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from clusterctl.config import hosts as ranges

_COLON = re.compile(r"([\w.-]+):([0-9]{1,4})")
_MAX = 1024


class ListingError(ValueError):
    """A list of hosts that cannot be had or read.

    Attributes:
        hint: A remedy, or `None`.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A host of a list; `None` leaves a key to the cluster file's `defaults`."""

    host: str
    gpus: int | None = None
    workers: int | None = None
    transport: tuple[str, ...] | None = None


def hosts_of(text: str) -> list[Listed]:
    """Read a host a line, in the forms of several launchers.

    `HOST`, `HOST slots=N`, `HOST gpus=N` and `HOST:N`; a range may stand for a host, and `#` begins a comment.
    Slots are workers, and so are lines that name a host again, as PBS writes them.

    Raises:
        ListingError: A line cannot be read, or there is none.
    """
    by_host: dict[str, Listed] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].replace(" = ", "=").split()
        for one in _line(number, words) if words else ():
            earlier = by_host.get(one.host, one)
            lines[one.host] = lines.get(one.host, 0) + (one.workers or 1)
            by_host[one.host] = replace(earlier, gpus=earlier.gpus if one.gpus is None else one.gpus)
        if len(by_host) > ranges.MAX_HOSTS:
            raise ListingError(f"it has more than {ranges.MAX_HOSTS} hosts")
    if not by_host:
        raise ListingError("it names no host", "it must have a host a line")
    crowded = next((host for host, count in lines.items() if count > _MAX), None)
    if crowded is not None:
        raise ListingError(f"it gives `{crowded}` more than {_MAX} workers")
    return [
        replace(one, workers=lines[host]) if one.workers or lines[host] > 1 else one for host, one in by_host.items()
    ]


def _line(number: int, words: list[str]) -> list[Listed]:
    name, *rest = words
    colon = _COLON.fullmatch(name)
    values = {"slots": int(colon[2])} if colon else {}
    for word in rest:
        key, equals, value = word.partition("=")
        if not equals or (key in ("slots", "gpus") and not re.fullmatch("[0-9]{1,4}", value)):
            raise ListingError(f"line {number}: `{word[:60]}` cannot be read", "a line is `HOST slots=N gpus=N`")
        if key in ("slots", "gpus"):
            values[key] = int(value)
    try:
        names = ranges.expand(colon[1] if colon else name)
    except ranges.RangeError as error:
        raise ListingError(f"line {number}: {error}") from error
    return [Listed(host=host, gpus=values.get("gpus"), workers=values.get("slots") or None) for host in names]
