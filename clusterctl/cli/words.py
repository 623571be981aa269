"""Words of a command line that several commands take: files, durations, ranks."""

from __future__ import annotations

import re
import sys
from datetime import date, datetime, timedelta
from datetime import time as clock_time
from pathlib import Path

import click

from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.suggestion import file_hint

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
    from clusterctl.config.value_parsers import InvalidValueError, parse_duration

    try:
        return parse_duration(text)
    except InvalidValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def parse_pause(text: str | None, option: str) -> float | None:
    """Return the seconds between two pictures, or `None` where nothing was given.

    Raises:
        click.BadParameter: It is no duration, or none at all: that would keep the nodes and this machine busy.
    """
    pause = parse_duration(text, option)
    if pause == 0:
        raise click.BadParameter("it must be longer than 0, e.g. 2s", param_hint=option)
    return pause


def parse_size(text: str | None, option: str, default: int) -> int:
    """Return bytes; `default` where nothing was given.

    Raises:
        click.BadParameter: It is no size.
    """
    if text is None:
        return default
    from clusterctl.config.value_parsers import InvalidValueError, parse_size

    try:
        return parse_size(text)
    except InvalidValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def parse_moment(text: str | None, option: str, *, now: float, began: float | None = None) -> float | None:
    """Return a wall clock time, or `None` where nothing was given.

    Args:
        text: A duration is that long ago, a time of day the last one before `now`; else RFC 3339.
        option: What it was given to, for the error.
        now: The end of what is looked at.
        began: Its begin: a time of day before it is meant for the day of `now`.

    Raises:
        click.BadParameter: It is none of them.
    """
    if text is None:
        return None
    if (of_day := _time_of_day(text)) is not None:
        day = datetime.fromtimestamp(now, tz=of_day.tzinfo).date()
        on_day, day_before = _on(day, of_day), _on(day - timedelta(days=1), of_day)
        return on_day if on_day <= now or (began is not None and day_before < began) else day_before
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        pass
    from clusterctl.config.value_parsers import InvalidValueError, parse_duration

    try:
        return now - parse_duration(text)
    except InvalidValueError as error:
        said = f"`{text}` is no time; write 10m (that long ago), 22:43:12 (a time of day), or RFC 3339"
        raise click.BadParameter(said, param_hint=option) from error


def _time_of_day(text: str) -> clock_time | None:
    try:
        return clock_time.fromisoformat(text) if text[2:3] == ":" else None
    except ValueError:
        return None


def _on(day: date, of_day: clock_time) -> float:
    return datetime.combine(day, of_day).timestamp()


def read(path: str) -> str:
    """Return the text of a file; `-` is stdin.

    Raises:
        NotFoundError: It cannot be read.
    """
    try:
        return sys.stdin.read() if path == "-" else Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror or error}", hint=file_hint(path)) from error
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
            raise click.BadParameter(f"`{text}` does not name ranks; write e.g. `0-3,7`", param_hint="--rank")
        ranks |= set(range(first, last + 1))
    return frozenset(ranks)
