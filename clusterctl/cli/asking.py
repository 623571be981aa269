"""The questions of `init` on a terminal: which hosts, how many GPUs each, which script, which Python."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import click

from clusterctl.config import starter_file
from clusterctl.config.sections.host_lists import parse_host_words

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clusterctl.config.sections.host_lists import ListedHost

T = TypeVar("T")

_NO_JOBS = ("setup.py", "conftest.py", "__init__.py")


@dataclass(frozen=True, slots=True)
class Answers:
    """What a person said."""

    machines: list[ListedHost]
    script: str
    python: str | None


def possible() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(script: str | None, tell: Callable[[str], None]) -> Answers:
    """Ask.

    Args:
        script: What to offer, or `None` where nothing in the folder looks like one.
        tell: Says what is wrong with an answer.
    """
    hosts = _until_right("Hosts, as ssh knows them (gpu[01-08], or a,b,c)", None, parse_host_words, tell)
    gpus = _until_right("GPUs each (a number, or auto)", "auto", gpus_of, tell)
    chosen = _until_right("Script of the job", script or "train.py", str, tell)
    python = _until_right("Python on the hosts that has what the script imports (a path, or auto)", "auto", str, tell)
    machines = [starter_file.set_gpus(machine, gpus) for machine in hosts]
    return Answers(machines, chosen, None if python == "auto" else python)


def gpus_of(text: str) -> int | None:
    """Return how many GPUs a word means; `None` for all that there turn out to be.

    Raises:
        ValueError: It means none of that.
    """
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) > 1024:
        raise ValueError(f"`{text}` is no number of GPUs; write e.g. 8, or auto")
    return int(text)


def script_here(folder: Path) -> str | None:
    """Return the one Python file of a folder that may be a job; `train.py` where it is one of several."""
    found = [path.name for path in sorted(folder.glob("*.py")) if path.name not in _NO_JOBS]
    return "train.py" if "train.py" in found else found[0] if len(found) == 1 else None


def _until_right(question: str, offered: str | None, read: Callable[[str], T], tell: Callable[[str], None]) -> T:
    """Ask until the answer can be read. Ctrl-C and the end of input leave without an answer."""
    while True:
        said = click.prompt(question, default=offered, err=True, prompt_suffix=": ").strip()
        try:
            return read(said)
        except ValueError as error:
            tell(f"  {error}")
