"""Where the time of a start went: a table with a row for each step, its slowest node named; a line; JSON."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from clusterctl.formatting import duration_text
from clusterctl.render.terminal.console import safe
from clusterctl.render.terminal.table import Column, render_table

if TYPE_CHECKING:
    from clusterctl.render.terminal.console import Terminal
    from clusterctl.run.record.start_times import StartTimes, StepTime

SLOW_SECONDS = 60.0
"""A start that takes longer is worth a line where people ask what is wrong."""


def render_timings(times: StartTimes, terminal: Terminal) -> list[str]:
    """Return the table of `up --timings`."""
    columns = [
        Column(title="STEP"),
        Column(title="ALL", right=True),
        Column(title="MEDIAN", right=True),
        Column(title="SLOWEST", shrink=True),
    ]
    rows = [[step.name, _seconds(step.seconds), _median(step), _slowest(step)] for step in times.steps]
    return render_table(columns, [*rows, ["in all", _seconds(times.seconds), "", ""]], terminal)


def slow_start(times: StartTimes | None) -> list[str]:
    """Return a line about a start that took long; none about others."""
    if times is None or times.seconds < SLOW_SECONDS:
        return []
    longest = max(times.steps, key=lambda step: step.seconds)
    slowest = _slowest(longest)
    named = f", slowest {slowest}" if slowest else ""
    total, part = duration_text(times.seconds), duration_text(longest.seconds)
    return [f"the start took {total}, {part} of it to {longest.name}{named}"]


def timings_json(times: StartTimes | None) -> dict[str, Any] | None:
    """Return the `start` of `status --json`."""
    if times is None:
        return None
    return {"seconds": round(times.seconds, 3), "steps": [_step_json(step) for step in times.steps]}


def _step_json(step: StepTime) -> dict[str, Any]:
    parts = {node: {"what": what, "seconds": seconds} for node, (what, seconds) in step.parts.items()}
    return {
        "step": step.name,
        "seconds": round(step.seconds, 3),
        "slowest": step.slowest,
        "nodes": dict(step.nodes),
        "longest": parts,
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _median(step: StepTime) -> str:
    return _seconds(median(step.nodes.values())) if step.nodes else ""


def _slowest(step: StepTime) -> str:
    if step.slowest is None:
        return ""
    what, seconds = step.parts.get(step.slowest, ("", 0.0))
    of = f" ({_seconds(seconds)}: {safe(what)})" if what else ""
    return f"{safe(step.slowest)} {_seconds(step.nodes[step.slowest])}{of}"
