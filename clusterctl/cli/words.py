"""Words of a command line that several commands take: files, durations, ranks."""

from __future__ import annotations

import re
import sys
import time
from datetime import datetime, timedelta
from datetime import time as clock
from pathlib import Path

import click

from clusterctl.errors import NotFoundError, RefusedError

DEFAULT_FILE = "cluster.yaml"


def paths_of(path: str | None, files: tuple[str, ...]) -> list[str]:
    """Return the cluster files to read: those named, else `./cluster.yaml`."""
    named = ([path] if path else []) + list(files)
    return named or [DEFAULT_FILE]


def parse_duration(text: str | None, option: str) -> float | None:
    """Return seconds, or `None` where nothing was given.

    Raises:
        click.BadParameter: It is no duration.
    """
    if text is None:
        return None
    from clusterctl.config.units import UnitError, duration

    try:
        return duration(text)
    except UnitError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def parse_moment(text: str | None, option: str) -> float | None:
    """Return a moment in seconds since the epoch, or `None` where nothing was given.

    A duration is that long ago; a time of day, as `logs -t` shows it, is the last one that has been here.

    Raises:
        click.BadParameter: It is none of them.
    """
    if text is None:
        return None
    try:
        return _time_of_day(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        pass
    from clusterctl.config.units import UnitError, duration

    try:
        return time.time() - duration(text)
    except UnitError as error:
        forms = "`10m` (that long ago), `22:43:12` (a time of day) or `2026-03-01T22:43:12` (RFC 3339)"
        raise click.BadParameter(f"`{text}` is no time: write {forms}", param_hint=option) from error


def _time_of_day(text: str) -> float:
    """Return when it last was this time of day here.

    Raises:
        ValueError: It is none.
    """
    if ":" not in text:
        raise ValueError(text)
    day, now = clock.fromisoformat(text), datetime.now().astimezone()
    moment = datetime.combine(now.date(), day, now.tzinfo)
    return (moment if moment <= now else moment - timedelta(days=1)).timestamp()


def read(path: str) -> str:
    """Return the text of a file; `-` is stdin.

    Raises:
        NotFoundError: It cannot be read.
    """
    try:
        return sys.stdin.read() if path == "-" else Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RefusedError(f"{path} is not a text file") from error


def write(path: str | Path, text: str) -> None:
    """Write a text file.

    Raises:
        RefusedError: It cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error.strerror or error}") from error


_ITEM = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")

_MOST = 1_000_000


def parse_ranks(text: str | None) -> frozenset[int] | None:
    """Return the ranks that a person named, or `None` for no choice.

    Raises:
        click.BadParameter: It is no set of ranks.
    """
    if text is None:
        return None
    ranks: set[int] = set()
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > _MOST:
            raise click.BadParameter(f"`{text}` is no set of ranks; write e.g. `0-3,7`", param_hint="--rank")
        ranks |= set(range(first, last + 1))
    return frozenset(ranks)
