"""Renders the processes of a run that could not be ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clusterctl.render.console import BOLD, Terminal, safe

_MAX_PROCESSES = 20


def render_remaining_processes(remaining: Iterable[Mapping[str, Any]], terminal: Terminal) -> list[str]:
    """Return a line for each process that may still exist."""
    entries = list(remaining)
    lines = [_render_process(entry, terminal) for entry in entries[:_MAX_PROCESSES]]
    more = len(entries) - len(lines)
    return [*lines, f"  and {more} more"] if more else lines


def _render_process(entry: Mapping[str, Any], terminal: Terminal) -> str:
    why = f" ({safe(entry['why'])})" if entry.get("why") else ""
    command = f" `{safe(entry['command'])}`" if entry.get("command") else ""
    pid = f" pid {entry['pid']}" if entry.get("pid") is not None else ""
    return f"  {terminal.style(safe(entry.get('node', '')), BOLD)}:{pid}{command}{why}"
