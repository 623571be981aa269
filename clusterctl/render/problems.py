"""Mistakes in a cluster file as people read them: place, reason, the line with a caret, a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.render.terminal.console import BOLD, CYAN, RED, YELLOW
from clusterctl.render.terminal.door import styled
from clusterctl.render.terminal.wrapping import cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.errors import ConfigError, Problem

_TAB = 4
_MOST = 100
"""Most problems shown: more than this have a common cause."""


def render_config_error(error: ConfigError, *, color: bool = False, width: int = 0) -> str:
    """Write all problems, and their number below.

    Args:
        error: What is wrong.
        color: Whether to use ANSI colours.
        width: Columns of the terminal, to cut long source lines around the caret; 0 leaves them whole.
    """
    blocks = _blocks(error.problems, "error", color=color, width=width)
    count = len(error.problems)
    files = len({problem.path for problem in error.problems})
    where = f" in {files} files" if files > 1 else f" in {error.problems[0].path}"
    blocks.append(f"{count} problem{'s' if count > 1 else ''}{where}; nothing was done")
    return "\n".join(blocks)


def render_warnings(warnings: Sequence[Problem], *, color: bool = False, width: int = 0) -> str:
    """Write warnings in the same form; empty where there are none."""
    return "\n".join(_blocks(warnings, "warning", color=color, width=width))


def _blocks(problems: Sequence[Problem], kind: str, *, color: bool, width: int) -> list[str]:
    blocks = [render_problem(problem, kind=kind, color=color, width=width) for problem in problems[:_MOST]]
    more = len(problems) - len(blocks)
    return [*blocks, f"and {more} more"] if more else blocks


def render_problem(problem: Problem, *, kind: str = "error", color: bool = False, width: int = 0) -> str:
    """Write one problem in up to four lines, without a line break at the end."""
    place = f"{problem.path}:{problem.line}:{problem.column}" if problem.line else problem.path
    tint = RED if kind == "error" else YELLOW
    lines = [f"{_styled(_visible(place), BOLD, color)}: {_styled(kind, tint, color)}: {_visible(problem.text)}"]
    if problem.source and problem.line:
        lines += _source_lines(problem, problem.source, tint if color else "", width)
    if problem.hint:
        lines.append(f"  {_styled('hint', CYAN, color)}: {_visible(problem.hint)}")
    return "\n".join(lines)


def _styled(text: str, style: str, color: bool) -> str:
    return styled(text, style) if color else text


def _source_lines(problem: Problem, source: str, tint: str, width: int) -> list[str]:
    number = str(problem.line)
    room = width - len(number) - 4 if width else 0
    text, column = _window(source, problem.column, room)
    before = _visible(text[: column - 1])
    marked = _visible(text[column - 1 : column - 1 + problem.length])
    caret = "^" + "~" * (cells(marked) - 1)
    caret = styled(caret, tint) if tint else caret
    return [f" {number} | {_visible(text)}", f" {' ' * len(number)} | {' ' * cells(before)}{caret}"]


def _window(source: str, column: int, room: int) -> tuple[str, int]:
    """Cut a line that does not fit, keeping the caret in sight."""
    column = min(column, len(source) + 1)
    if room < 20 or cells(_visible(source)) <= room:
        return source, column
    start = max(0, min(column - 1 - room // 3, len(source) - room))
    return source[start : start + room], column - start


def _visible(text: str) -> str:
    """Tabs as blanks, control characters as `?`: text of a file never steers the terminal."""
    text = text.replace("\t", " " * _TAB)
    return "".join(c if c.isprintable() else "?" for c in text)
