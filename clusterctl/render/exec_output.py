"""Renders the output of a command on many nodes: equal outputs once, differences between nodes, and failures."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import ExitCode
from clusterctl.formatting import group_pairs, plural, signal_name
from clusterctl.logs.safe_text import clean_block
from clusterctl.render.console import BOLD, Terminal, pad


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The result of a command on a node. `error` says why the command did not run, or that it took too long."""

    exit_code: int | None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    error: str | None = None


def make_command_result(result: Mapping[str, Any], out: bytes, err: bytes, seconds: float | None) -> CommandResult:
    """Build the result of a command from the agent's answer to `exec`, the output and the time limit."""
    error = f"not done within {seconds:g} s" if result.get("timed_out") and seconds is not None else None
    return CommandResult(
        exit_code=result.get("exit_code"), signal=result.get("signal"), stdout=out, stderr=err, error=error
    )


def compute_exit_code(result: CommandResult) -> int:
    """Return the exit code as a shell would: 128 + N for signal N, 124 for a timeout."""
    if result.error is not None and (result.signal is not None or result.exit_code is None):
        return int(ExitCode.WAIT_TIMED_OUT)
    return 128 + result.signal if result.signal is not None else result.exit_code or 0


def sanitize_output(block: bytes, terminal: Terminal) -> list[str]:
    """Return the lines of an output without control sequences, with its colours if the terminal shows colours."""
    return [terminal.filter_colours(line) for line in clean_block(block)] if block else []


def _groups(outputs: Mapping[str, bytes]) -> list[tuple[list[str], bytes]]:
    """Return groups of nodes with equal output, in the order of their first nodes. Omit nodes that wrote nothing."""
    groups = group_pairs((output, node) for node, output in outputs.items() if output)
    return [(nodes, output) for output, nodes in groups.items()]


def _title(nodes: list[str]) -> str:
    return fold_hosts(nodes) + (f" ({len(nodes)})" if len(nodes) > 1 else "")


def _header(nodes: list[str], terminal: Terminal) -> list[str]:
    rule = "-" * 15
    return [rule, terminal.style(_title(nodes), BOLD), rule]


def fold_stdout(results: Mapping[str, CommandResult], terminal: Terminal) -> list[str]:
    """Return lines with the stdout of all nodes, equal output once. Node names are above the output or beside it."""
    groups = [
        (nodes, sanitize_output(output, terminal))
        for nodes, output in _groups({n: a.stdout for n, a in results.items()})
    ]
    if all(len(output) == 1 for _, output in groups):
        titles = [_title(nodes) for nodes, _ in groups]
        width = max(map(len, titles), default=0)
        return [
            f"{pad(terminal.style(title, BOLD), width)}  {output[0]}"
            for title, (_, output) in zip(titles, groups, strict=True)
        ]
    return [line for nodes, output in groups for line in (*_header(nodes, terminal), *output)]


def fold_stderr(results: Mapping[str, CommandResult], terminal: Terminal) -> list[str]:
    """Return stderr of all nodes, equal output once; each line begins with the names of the nodes."""
    lines: list[str] = []
    for nodes, output in _groups({node: a.stderr for node, a in results.items()}):
        name = fold_hosts(nodes)
        lines += [f"{name}: {line}" for line in sanitize_output(output, terminal)]
    return lines


def diff_stdout(results: Mapping[str, CommandResult], terminal: Terminal) -> list[str]:
    """Return lines of the most frequent stdout, then the differences between this stdout and each other stdout."""
    groups = group_pairs((result.stdout, node) for node, result in results.items())
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    if not ordered:
        return []
    (base, most), others = ordered[0], ordered[1:]
    lines = [*_header(most, terminal), *sanitize_output(base, terminal)]
    for output, nodes in others:
        names = fold_hosts(most), fold_hosts(nodes)
        lines += difflib.unified_diff(
            sanitize_output(base, terminal), sanitize_output(output, terminal), *names, n=1, lineterm=""
        )
    return lines


def describe_exits(results: Mapping[str, CommandResult], *, include_success: bool = False) -> list[str]:
    """Return a line for each exit code, signal and error, with its nodes; code 0 only with `include_success`."""
    ends: dict[str, list[str]] = {}
    for node, result in results.items():
        if result.error is not None:
            ends.setdefault(result.error, []).append(node)
        elif result.signal is not None:
            ends.setdefault(f"ended by {signal_name(result.signal)}", []).append(node)
        elif result.exit_code or include_success:
            ends.setdefault(f"exit code {result.exit_code}", []).append(node)
    return [f"{fold_hosts(nodes)} ({plural(len(nodes), 'node')}): {end}" for end, nodes in ends.items()]
