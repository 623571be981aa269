"""Renders the table of runs of `ps` and `clean`: start, duration and end of each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import format_duration, format_size, plural
from clusterctl.render.attempt_table import describe_cause, describe_cause_briefly
from clusterctl.render.console import Terminal
from clusterctl.render.line_wrapping import count_columns
from clusterctl.render.run_messages import format_step, stall_line
from clusterctl.render.status_report import RunSnapshot, round_seconds, run_json, state_cell
from clusterctl.render.table import GAP, Cell, Column, format_cell, make_columns, render_table
from clusterctl.run.rules.outcome import find_final_cause
from clusterctl.run.rules.state import RunPhase, RunState

_Row = dict[str, Cell | str]

_NOT_STARTED = "not started"
_DROPPED_FIRST = ("NODES", "RANKS", "PROGRESS", "STEP", "STARTED", "TOOK")
"""Columns that a narrow terminal omits, in this order, to have room for the ids of runs and the reasons of ends."""

_MIN_REASON = 26
"""The number of characters of a reason to show. Other columns are omitted to make room for them."""

_WIDE = 100
"""The minimum number of terminal columns at which a step is shown with its attempt."""


def has_not_started(state: RunState) -> bool:
    """Return whether a run ended before any of its workers ran."""
    if not state.is_over or state.phase is RunPhase.UNREADABLE:
        return False
    cause = find_final_cause(state)
    return state.attempt < 0 or (state.attempt == 0 and cause is not None and cause.kind == "start_failed")


def sort_runs(snapshots: Sequence[RunSnapshot]) -> list[RunSnapshot]:
    """Return runs in the order of a list: unreadable runs, started runs (newest first), runs that did not start."""
    unreadable = [v for v in snapshots if v.state.phase is RunPhase.UNREADABLE]
    known = sorted((v for v in snapshots if v not in unreadable), key=lambda v: v.state.created or 0.0, reverse=True)
    return [*unreadable, *sorted(known, key=lambda v: has_not_started(v.state))]


def render_ps(
    snapshots: Sequence[RunSnapshot],
    now: float,
    terminal: Terminal,
    *,
    sizes: Mapping[str, int] | None = None,
    header: bool = True,
) -> list[str]:
    """Return the table of runs, one line for each run.

    Args:
        snapshots: The runs.
        now: The head's wall clock.
        terminal: The terminal that will show the table.
        sizes: The bytes of each run on this head; `None` omits the column.
        header: Whether to begin with the line of titles.
    """
    wide = terminal.width is None or terminal.width >= _WIDE
    rows = [_row(snapshot, now, wide=wide) for snapshot in snapshots]
    if sizes is not None:
        rows = [row | {"SIZE": format_size(sizes[run.state.run])} for row, run in zip(rows, snapshots, strict=True)]
    left_out = {"PROGRESS"} if all(snapshot.state.is_over for snapshot in snapshots) else set[str]()
    columns = [c for c in _COLUMNS if c.title not in left_out and (c.title != "SIZE" or sizes is not None)]
    if terminal.width is not None:
        columns = _fitting(columns, rows, terminal.width)
        if _needed(columns, rows) > terminal.width:
            rows = [row | {"WHY": _why(snapshot, short=True)} for row, snapshot in zip(rows, snapshots, strict=True)]
    return render_table(columns, [[row[c.title] for c in columns] for row in rows], terminal, header=header)


def _fitting(columns: list[Column], rows: Sequence[_Row], width: int) -> list[Column]:
    """Return the columns that fit into `width`; reasons may be cut at their end."""
    empty = {title for title in _DROPPED_FIRST if all(row[title] == "-" for row in rows)}
    for title in sorted(_DROPPED_FIRST, key=lambda title: title not in empty):
        if _needed(columns, rows, max_reason=_MIN_REASON) <= width:
            break
        columns = [column for column in columns if column.title != title]
    return columns


def _needed(columns: Sequence[Column], rows: Sequence[_Row], max_reason: int | None = None) -> int:
    """Return the width of a table in which only reasons longer than `max_reason` are cut."""
    widest = {c.title: max((count_columns(format_cell(row[c.title])) for row in rows), default=0) for c in columns}
    if max_reason is not None:
        widest["WHY"] = min(widest["WHY"], max_reason)
    return sum(max(count_columns(title), taken) for title, taken in widest.items()) + GAP * (len(columns) - 1)


def adoption_hints(snapshots: Sequence[RunSnapshot]) -> list[str]:
    """Return a hint with the command for runs without a controller."""
    alone = [snapshot.state.run for snapshot in snapshots if not snapshot.has_controller and not snapshot.state.is_over]
    command = f"clusterctl attach --adopt {alone[0] if len(alone) == 1 else 'RUN'}"
    return [f"hint: `{command}` starts a new controller"] if alone else []


def ps_hints(snapshots: Sequence[RunSnapshot]) -> list[str]:
    """Return hints with the commands for runs without a controller, and for runs with remaining processes."""
    left = [snapshot.state.run for snapshot in snapshots if snapshot.state.is_over and snapshot.state.remaining]
    ends = f"hint: `clusterctl down {' '.join(left)}` ends what may still run of {'it' if len(left) == 1 else 'them'}"
    return [*adoption_hints(snapshots), *([ends] if left else [])]


_COLUMNS = make_columns("~RUN", "STATE", "STARTED", ">TOOK", ">NODES", ">RANKS", ">STEP", ">PROGRESS", ">SIZE", "~WHY")


def _row(snapshot: RunSnapshot, now: float, *, wide: bool) -> _Row:
    state = snapshot.state
    end = now if state.ended is None else state.ended
    progress = snapshot.last_progress_s
    return {
        "RUN": state.run,
        "STATE": state_cell("failed", _NOT_STARTED) if has_not_started(state) else state_cell(state.phase.value),
        "STARTED": "-" if state.created is None else _when(state.created, now),
        "TOOK": "-" if state.created is None else format_duration(end - state.created),
        "NODES": str(len(state.nodes)) if state.nodes else "-",
        "RANKS": str(state.world_size or "-"),
        "STEP": "-" if snapshot.step is None else format_step(snapshot.step, state.attempt if wide else 0),
        "PROGRESS": "-"
        if progress is None or state.is_over or state.stall is not None
        else f"{format_duration(progress)} ago",
        "WHY": _why(snapshot),
    }


def _why(snapshot: RunSnapshot, *, short: bool = False) -> str:
    state = snapshot.state
    if not state.is_over:
        return _remark(snapshot)
    nodes = fold_hosts(dict.fromkeys(entry["node"] for entry in state.remaining))
    why = _why_it_ended(state, short=short)
    return "; ".join(part for part in (f"may still run on {nodes}" if nodes else "", why) if part)


def _when(time: float, now: float) -> str:
    """Return the start of a run in short form; for a start today, only the time."""
    began, today = datetime.fromtimestamp(time).astimezone(), datetime.fromtimestamp(now).astimezone()
    if began.date() == today.date():
        return f"{began:%H:%M:%S}"
    return f"{began:%m-%d %H:%M}" if began.year == today.year else f"{began:%Y-%m-%d}"


def _why_it_ended(state: RunState, *, short: bool) -> str:
    if state.phase is RunPhase.UNREADABLE:
        return "cannot be read: `clusterctl clean` removes it"
    if state.phase is RunPhase.SUCCEEDED:
        return f"after {plural(state.attempt, 'restart')}" if state.attempt > 0 else ""
    cause = find_final_cause(state)
    if cause is not None and cause.kind == "start_failed":
        # Remove the end of the message, because the state column says that nothing was started.
        return cause.message.removesuffix("; nothing was started")
    if cause is not None:
        return describe_cause_briefly(cause) if short else describe_cause(cause, with_message=True)
    return "" if state.phase is RunPhase.CANCELLED or state.exit_code is None else f"exit {state.exit_code}"


def _remark(snapshot: RunSnapshot) -> str:
    state = snapshot.state
    if state.stall is not None:
        # The text omits the phase of the stall, because the state column shows whether the stall is confirmed.
        return stall_line(replace(state.stall, phase=""))
    if state.idle_since is not None:
        return "its GPUs are idle"
    if not snapshot.has_controller:
        return snapshot.unattended_run.short_text
    if state.phase is RunPhase.WAITING:
        return "; ".join(state.waits_for)
    if away := [node.node for node in state.nodes.values() if node.link == "unreachable" and not node.swept]:
        return f"unreachable: {fold_hosts(away)}"
    return f"attempt {state.attempt}" if state.attempt > 0 else ""


def ps_json(snapshots: Sequence[RunSnapshot]) -> list[dict[str, Any]]:
    """Return `ps --json`."""
    return [
        run_json(snapshot)
        | {
            "nodes": len(snapshot.state.nodes),
            "world_size": snapshot.state.world_size,
            "step": snapshot.step,
            "last_progress_s": round_seconds(snapshot.last_progress_s),
            "file": snapshot.state.path or None,
            "not_started": has_not_started(snapshot.state),
        }
        for snapshot in snapshots
    ]
