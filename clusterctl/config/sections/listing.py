"""Lists of hosts that others write: a host a line, with what is said of it. There is no other reader of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from clusterctl.config import host_ranges as ranges

_NUMBERED = re.compile(r"([^:]+):([0-9]+)")
_MAX = 1024
_SSH_PORT = 22
_FORM = "a line is `HOST slots=N gpus=N`, `HOST:N` or `USER@HOST slots=N`"


class ListingError(ValueError):
    """A list of hosts that cannot be had or read.

    Attributes:
        hint: A remedy, or `None`.
        line: Where it is, from 1; 0 where that is no one line.
    """

    def __init__(self, message: str, hint: str | None = None, line: int = 0) -> None:
        super().__init__(message)
        self.hint = hint
        self.line = line


@dataclass(frozen=True)
class Machine:
    """A host that is not written in a cluster file yet; `None` leaves a key to what else is known of it.

    Attributes:
        host: Its name.
        gpus: A count, or indices.
        address, user, port, identity_file, proxy_jump: How to reach it.
        python, workers, transport: As in a cluster file.
    """

    host: str
    gpus: int | tuple[int, ...] | None = None
    address: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None
    python: str | None = None
    workers: int | None = None
    transport: tuple[str, ...] | None = None


def hosts_of(text: str) -> list[Machine]:
    """Read a host a line, in the forms of several launchers; see `hosts_of_line`.

    A range may stand for a host, and `#` begins a comment. Slots are workers, and so are lines that name a host again,
    as PBS writes them.

    Raises:
        ListingError: A line cannot be read, or there is none.
    """
    by_host: dict[str, Machine] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(without_mark(text).splitlines(), 1):
        for one in hosts_of_line(line, number):
            earlier = by_host.get(one.host, one)
            lines[one.host] = lines.get(one.host, 0) + (one.workers or 1)
            by_host[one.host] = replace(earlier, gpus=earlier.gpus if one.gpus is None else one.gpus)
            if (one.user, one.port) != (earlier.user, earlier.port):
                raise ListingError(f"line {number}: `{one.host}` is reached in another way than before", line=number)
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


def without_mark(text: str) -> str:
    """Return a text without the byte order mark that editors of Windows begin files with."""
    return text.removeprefix("\ufeff")


def hosts_of_line(line: str, number: int) -> list[Machine]:
    """Read one line of a hostfile: `[USER@]HOST[:N] [slots=N] [gpus=N]`; none where nothing but a comment is in it.

    `HOST:N` is a count of slots, as for MPICH; with `slots=` beside it, or where no machine has as many, a port.

    Args:
        line: The text.
        number: Of the line, for messages.

    Raises:
        ListingError: It cannot be read, or says what no cluster file can.
    """
    words = re.sub(r"\s+=\s+", "=", line.partition("#")[0]).split()
    if not words:
        return []
    values = _values(words[1:], number)
    user, _, name = words[0].rpartition("@")
    numbered = _NUMBERED.fullmatch(name)
    port = None
    if numbered:
        name, count = numbered[1], int(numbered[2])
        if "slots" in values or count == _SSH_PORT or count > _MAX:
            port = count
        else:
            values["slots"] = count
    if values.get("slots") == 0:
        hint = "leave the line out"
        raise ListingError(f"line {number}: no slots are no workers on `{name[:60]}`", hint, number)
    if port is not None and not 0 < port < 65536:
        raise ListingError(f"line {number}: {port} is no port", line=number)
    try:
        names = ranges.expand_hosts(name)
    except ranges.HostRangeError as error:
        raise ListingError(f"line {number}: {error}", error.hint, number) from error
    gpus, workers = values.get("gpus"), values.get("slots")
    return [Machine(host, gpus=gpus, user=user or None, port=port, workers=workers) for host in names]


def _values(words: list[str], number: int) -> dict[str, int]:
    values: dict[str, int] = {}
    for word in words:
        key, _, value = word.partition("=")
        key = key.lower().replace("-", "_")
        if key not in ("slots", "max_slots", "gpus") or not re.fullmatch("[0-9]{1,4}", value) or key in values:
            raise ListingError(f"line {number}: `{word[:60]}` cannot be read", _FORM, number)
        values[key] = int(value)
    return values
