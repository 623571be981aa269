"""Renders errors for people: the problem, then the remedy. Equal errors of several nodes are shown once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import (
    ClusterctlError,
    ConfigError,
    NodeError,
    NodesError,
    Problem,
    TeardownError,
    UnhealthyError,
)
from clusterctl.render.console import BOLD, CYAN, PEER_LIMIT, RED, YELLOW, Console, Terminal, safe
from clusterctl.render.health_report import render_findings_by_check
from clusterctl.render.line_wrapping import count_columns
from clusterctl.render.remaining_processes import render_remaining_processes

_ADDRESS = re.compile(r"(?:-p \d+ )?[\w.\\-]+@[\w.:%@\[\]-]+")
"""The address of a node in a hint (`SshOptions.address`). Hints for the same error differ only in this address."""
_MOST_LINES = 60
"""The largest number of lines to show of a message."""


def print_error(error: ClusterctlError, console: Console | None = None) -> None:
    """Write an error to stderr."""
    console = console or Console.for_standard_streams()
    console.write_stderr(*render_error(error, console.err))


def render_error(error: ClusterctlError, terminal: Terminal) -> list[str]:
    """Return an error as lines: `error: …`, details if any, `hint: …`."""
    match error:
        case ConfigError():
            return render_config_error(error, terminal)
        case NodesError():
            return _nodes([(e.node, str(e), e.hint) for e in error.errors], terminal)
        case NodeError():
            return _nodes([(error.node, str(error), error.hint)], terminal)
        case UnhealthyError() if error.findings:
            return _unhealthy(str(error), error.findings, error.hint, terminal)
        case TeardownError():
            lines = [error_line(str(error), terminal), *render_remaining_processes(error.remaining, terminal)]
            return [*lines, *hint_lines(error.hint, terminal)]
        case _:
            return [error_line(str(error), terminal), *hint_lines(error.hint, terminal)]


def error_line(text: str, terminal: Terminal) -> str:
    """Return the line `error: …`."""
    return f"{terminal.style('error', RED, BOLD)}: {_text(text)}"


def hint_lines(hint: str | None, terminal: Terminal) -> list[str]:
    """Return the line `hint: …`; nothing without a hint."""
    return [f"{terminal.style('hint', CYAN)}: {_text(hint)}"] if hint else []


def render_start_error(error: Mapping[str, Any], terminal: Terminal) -> list[str]:
    """Return the lines about a start that failed, from the controller's event (`StartFailed.error`)."""
    nodes = error.get("nodes")
    if nodes:
        return _nodes([(str(n["node"]), str(n["message"]), n.get("hint")) for n in nodes], terminal)
    message, hint = str(error.get("message", "the start failed")), error.get("hint")
    if findings := error.get("findings"):
        return _unhealthy(message, findings, hint, terminal)
    if node := error.get("node"):
        return _nodes([(str(node), message, hint)], terminal)
    return [error_line(message, terminal), *hint_lines(hint, terminal)]


def _unhealthy(message: str, findings: Sequence[Any], hint: str | None, terminal: Terminal) -> list[str]:
    return [*render_findings_by_check(findings, terminal), error_line(message, terminal), *hint_lines(hint, terminal)]


def _nodes(errors: Sequence[tuple[str, str, str | None]], terminal: Terminal) -> list[str]:
    """Return lines with the nodes' messages, in the order of nodes. Equal messages and equal hints appear once."""
    groups: dict[tuple[str, str | None], list[tuple[str, str | None]]] = {}
    for node, message, hint in errors:
        alike = _ADDRESS.sub("", hint) if hint else None
        groups.setdefault((message.removeprefix(f"{node}: "), alike), []).append((node, hint))
    lines: list[str] = []
    hints = [_shared([hint for _, hint in same]) for same in groups.values()]
    for number, ((message, _), same) in enumerate(groups.items()):
        lines.append(error_line(f"{fold_hosts(node for node, _ in same)}: {message}", terminal))
        hint = hints[number]
        if hint not in hints[number + 1 :]:
            lines += hint_lines(hint, terminal)
    return lines


def _shared(hints: Sequence[str | None]) -> str | None:
    """Return one hint for several nodes. The nodes' hints differ at most in the address."""
    first, different = hints[0], len(set(hints))
    return first if different == 1 else f"{first}; likewise for the other {different - 1}"


def _text(text: str) -> str:
    """Return a text of limited length that may have several lines; the sanitizer indents all lines but the first."""
    lines = [safe(line) for line in text[:PEER_LIMIT].splitlines()]
    more = len(lines) - _MOST_LINES
    shown = [*lines[:_MOST_LINES], f"[{more} more lines]"] if more > 0 else lines
    if len(text) > PEER_LIMIT:
        shown.append(f"[{len(text) - PEER_LIMIT:,} more characters]")
    return "\n".join(shown)


_TAB = 4
_MOST = 100
"""The largest number of problems to show. More problems usually have a common cause."""


def render_config_error(error: ConfigError, terminal: Terminal) -> list[str]:
    """Return lines with all problems of a cluster file, then their number; long source lines are cut at the caret."""
    count = len(error.problems)
    files = len({problem.path for problem in error.problems})
    where = f" in {files} files" if files > 1 else f" in {error.problems[0].path}"
    total = f"{count} problem{'s' if count > 1 else ''}{where}; nothing was done"
    return [*render_problems(error.problems, "error", terminal), total]


def render_problems(problems: Sequence[Problem], kind: str, terminal: Terminal) -> list[str]:
    """Return up to four lines for each problem; `kind` is `error` or `warning`."""
    lines = [line for problem in problems[:_MOST] for line in _problem_lines(problem, kind, terminal)]
    more = len(problems) - _MOST
    return [*lines, f"and {more} more"] if more > 0 else lines


def _problem_lines(problem: Problem, kind: str, terminal: Terminal) -> list[str]:
    place = f"{problem.path}:{problem.line}:{problem.column}" if problem.line else problem.path
    tint = RED if kind == "error" else YELLOW
    heading = f"{terminal.style(_visible(place), BOLD)}: {terminal.style(kind, tint)}"
    lines = [f"{heading}: {_visible(problem.text)}"]
    if problem.source and problem.line:
        number = str(problem.line)
        room = terminal.width - len(number) - 4 if terminal.width else 0
        text, column = _window(problem.source, problem.column, room)
        before = _visible(text[: column - 1])
        marked = _visible(text[column - 1 : column - 1 + problem.length])
        caret = terminal.style("^" + "~" * (count_columns(marked) - 1), tint)
        lines.append(f" {number} | {_visible(text)}")
        lines.append(f" {' ' * len(number)} | {' ' * count_columns(before)}{caret}")
    if problem.hint:
        lines.append(f"  {terminal.style('hint', CYAN)}: {_visible(problem.hint)}")
    return lines


def _window(source: str, column: int, room: int) -> tuple[str, int]:
    """Return the part of a source line that fits and contains the caret, and the caret's column in this part."""
    column = min(column, len(source) + 1)
    if room < 20 or count_columns(_visible(source)) <= room:
        return source, column
    start = max(0, min(column - 1 - room // 3, len(source) - room))
    return source[start : start + room], column - start


def _visible(text: str) -> str:
    """Return a text with tabs as blanks and control characters as `?`, so that it cannot control the terminal."""
    text = text.replace("\t", " " * _TAB)
    return "".join(c if c.isprintable() else "?" for c in text)
