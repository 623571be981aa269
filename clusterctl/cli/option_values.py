"""Parses values of options that several commands take: files, durations, sizes, times, ranks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from datetime import date, datetime, timedelta
from datetime import time as clock_time
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from clusterctl.config import value_parsers
from clusterctl.config.value_parsers import InvalidValueError
from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.formatting import format_size
from clusterctl.suggestion import suggest_similar_file

if TYPE_CHECKING:
    from clusterctl.render.console import Console

T = TypeVar("T")

DEFAULT_FILE = "cluster.yaml"


def list_cluster_files(path: str | None, files: tuple[str, ...]) -> list[str]:
    """Return the named cluster files, or `./cluster.yaml` if none is named."""
    named = ([path] if path else []) + list(files)
    return named or [DEFAULT_FILE]


def parse_duration_option(text: str | None, option: str) -> float | None:
    """Return a duration in seconds; `None` if the option is not given.

    Raises:
        click.BadParameter: The text is not a duration.
    """
    return None if text is None else _parse(value_parsers.parse_duration, text, option)


def parse_interval_option(text: str | None, option: str) -> float | None:
    """Return the time between two updates in seconds; `None` if the option is not given.

    Raises:
        click.BadParameter: The text is not a duration, or is 0.
    """
    pause = parse_duration_option(text, option)
    if pause == 0:
        raise click.BadParameter("the interval must be longer than 0, e.g. 2s", param_hint=option)
    return pause


def parse_size_option(text: str | None, option: str, default: int) -> int:
    """Return a size in bytes; `default` if the option is not given.

    Raises:
        click.BadParameter: The text is not a size.
    """
    return default if text is None else _parse(value_parsers.parse_size, text, option)


def _parse(parse: Callable[[str], T], text: str, option: str) -> T:
    try:
        return parse(text)
    except InvalidValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def parse_time_option(text: str | None, option: str, *, now: float, run_start: float | None = None) -> float | None:
    """Return a time in seconds since the epoch; `None` if the option is not given.

    Args:
        text: A time in RFC 3339, a duration before `now`, or a time of day (its last occurrence before `now`).
        option: The name of the option, for the error.
        now: The end of the run, or the current time.
        run_start: The start of the run. A time of day whose last occurrence is before `run_start` is on the day of
            `now`.

    Raises:
        click.BadParameter: The text is not a time.
    """
    if text is None:
        return None
    if (of_day := _parse_time_of_day(text)) is not None:
        day = datetime.fromtimestamp(now, tz=of_day.tzinfo).date()
        on_day, day_before = _combine(day, of_day), _combine(day - timedelta(days=1), of_day)
        return on_day if on_day <= now or (run_start is not None and day_before < run_start) else day_before
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        pass
    try:
        return now - value_parsers.parse_duration(text)
    except InvalidValueError as error:
        said = f"`{text}` is not a time; write 10m (10 minutes ago), 22:43:12 (a time of day), or RFC 3339"
        raise click.BadParameter(said, param_hint=option) from error


def _parse_time_of_day(text: str) -> clock_time | None:
    try:
        return clock_time.fromisoformat(text) if text[2:3] == ":" else None
    except ValueError:
        return None


def _combine(day: date, of_day: clock_time) -> float:
    return datetime.combine(day, of_day).timestamp()


def read_text_file(path: str) -> str:
    """Return the text of a file; the path `-` means stdin.

    Raises:
        NotFoundError: The file cannot be read.
    """
    try:
        return sys.stdin.read() if path == "-" else Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror or error}", hint=suggest_similar_file(path)) from error
    except UnicodeDecodeError as error:
        raise RefusedError(f"{path} is not a text file") from error


def write_text_file(path: str | Path, text: str) -> None:
    """Write a text file.

    Raises:
        RefusedError: The file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error.strerror or error}") from error


def write_output(console: Console, output: str | None, default: str, text: str, *, quiet: bool) -> None:
    """Write the result of a command to the file of its option `-o`, and print name and size of the file.

    Args:
        console: Where to print.
        output: The value of the option; `-` means stdout.
        default: The name of the file without the option.
        text: The result.
        quiet: Print nothing but the result.

    Raises:
        RefusedError: The file cannot be written.
    """
    if output == "-":
        console.write_stdout_text(text)
        return
    write_text_file(output or default, text)
    if not quiet:
        console.write_stderr(f"{output or default}: {format_size(len(text.encode()))}")


_RANK_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")

_MAX_RANK = 1_000_000


def parse_rank_set(text: str | None) -> frozenset[int] | None:
    """Return the ranks of a set such as `0-3,7`; `None` if the option is not given.

    Raises:
        click.BadParameter: The text is not a set of ranks.
    """
    if text is None:
        return None
    ranks: set[int] = set()
    for item in text.split(","):
        match = _RANK_RANGE.fullmatch(item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > _MAX_RANK:
            raise click.BadParameter(f"`{text}` is not a set of ranks; write e.g. `0-3,7`", param_hint="--rank")
        ranks |= set(range(first, last + 1))
    return frozenset(ranks)


def parse_listen_address(text: str) -> tuple[str, int]:
    """Return the address and the port of `PORT`, `ADDRESS:PORT` or `[ADDRESS]:PORT`.

    Raises:
        click.BadParameter: The text does not have this form.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    try:
        address, number = str(ip_address("127.0.0.1" if host == "localhost" else host)), int(port)
    except ValueError:
        number, address = -1, ""
    if not 0 <= number <= 65535:
        said = f"`{text}` is not PORT or ADDRESS:PORT with an IP address, e.g. 9736 or 127.0.0.1:9736"
        raise click.BadParameter(said, param_hint="--listen")
    return address, number


def is_own_host(header: str, *, is_loopback: bool) -> bool:
    """Return whether a `Host` header names the server that got it.

    A page of another site that resolves its own name to this machine (DNS rebinding) has another name in this header.
    An address cannot be rebound.

    Args:
        header: The header.
        is_loopback: Whether the server listens on a loopback address.
    """
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() and not header.endswith("]") else header
    if name.lower() == "localhost":
        return True
    try:
        address = ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return not is_loopback and name.lower() == os.uname().nodename.lower()
    return address.is_loopback or not is_loopback
