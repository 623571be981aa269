"""Renders the output of `who`: each GPU and node, free or with its holder. Equal nodes share their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import describe_duration, fold_ranks, format_duration, format_size, group_pairs, plural
from clusterctl.render.console import BOLD, DIM, GREEN, RED, YELLOW, Terminal, safe
from clusterctl.render.line_wrapping import wrap_line
from clusterctl.render.log_output import format_rfc3339
from clusterctl.render.stats_table import percent
from clusterctl.render.table import Cell, Column, make_columns, render_table
from clusterctl.run.rules.node_use import Holder, HolderKind, NodeUse

_COLUMNS = (
    *make_columns("~NODE", "GPU", "USER", ">SINCE", ">MEMORY", ">UTIL"),
    Column(title="WHAT", shrink=True, wraps=True),
)
_WIDE = 100
"""The minimum number of terminal columns at which the memory is shown, and commands with more characters."""
_MAX_COMMAND, _MAX_COMMAND_NARROW = 60, 24
_MAX_ROWS = 24
"""The maximum number of rows of a node."""
_TIMES = ("since", "until", "step_at", "idle_since")


def render_node_use(nodes: Sequence[NodeUse], now: float, terminal: Terminal) -> list[str]:
    """Return the table, a line with totals, and the notes about what could not be seen.

    Args:
        nodes: The use of each node.
        now: The head's wall clock.
        terminal: The terminal that will show the lines.
    """
    wide = terminal.width is None or terminal.width >= _WIDE
    columns = [column for column in _COLUMNS if wide or column.title != "MEMORY"]
    groups = group_pairs((_make_key(node, now), node) for node in nodes)
    rows: list[list[Cell | str]] = []
    for alike in groups.values():
        name: Cell | str = Cell(fold_hosts(node.node for node in alike), (BOLD,))
        for row in _list_rows(alike, now, wide=wide):
            rows.append([name, *(cell for cell, column in zip(row, _COLUMNS[1:], strict=True) if column in columns)])
            name = ""
    notes = group_pairs((note, node.node) for node in nodes for note in node.notes)
    texts = [_describe_totals(nodes, now), *(f"{fold_hosts(names)}: {note}" for note, names in notes.items())]
    lines = [line for text in texts for line in wrap_line(safe(text), terminal.width)]
    return [*render_table(columns, rows, terminal), "", *lines]


def _make_key(node: NodeUse, now: float) -> object:
    """Return a value that is equal for nodes that share their rows."""
    holders = tuple(
        (h.kind, h.gpus, h.user, h.name, h.workers, h.until, h.note, h.is_idle(now), len(h.pids)) for h in node.holders
    )
    return (node.gpus, holders, node.error, node.is_known)


def _list_rows(alike: Sequence[NodeUse], now: float, *, wide: bool) -> list[list[Cell | str]]:
    first = alike[0]
    if first.error:
        return [["-", "-", "-", "-", "-", Cell(first.error, (RED,))]]
    rows = [_holder_row([node.holders[index] for node in alike], now, wide=wide) for index in range(len(first.holders))]
    if len(rows) > _MAX_ROWS:
        more = f"{len(rows) - _MAX_ROWS + 1} holders more"
        rows = [*rows[: _MAX_ROWS - 1], ["", "", "", "", "", Cell(more, (DIM,))]]
    if not first.is_known:
        rows.append(["-", "-", "-", "-", "-", Cell("its use cannot be seen", (YELLOW,))])
    if first.free_gpus or first.is_free:
        which = "-" if not first.free_gpus else fold_ranks(first.free_gpus)
        rows.append([which, "-", "-", "-", "-", Cell("free", (GREEN,))])
    return rows


def _holder_row(holders: Sequence[Holder], now: float, *, wide: bool) -> list[Cell | str]:
    holder = holders[0]
    since = min((h.since for h in holders if h.since is not None), default=None)
    sizes = [format_size(h.memory) for h in sorted(holders, key=lambda h: h.memory or 0) if h.memory is not None]
    utils = sorted(h.util for h in holders if h.util is not None)
    util: Cell | str = percent(utils[0]) if utils else "-"
    if utils and percent(utils[-1]) != percent(utils[0]):
        util = f"{utils[0]:.0f}-{percent(utils[-1])}"
    if holder.is_idle(now):
        longest = max(now - h.idle_since for h in holders if h.idle_since is not None)
        util = Cell(f"idle {describe_duration(longest)}", (YELLOW,))
    return [
        fold_ranks(holder.gpus) if holder.gpus else "-",
        holder.user or "-",
        "-" if since is None else format_duration(now - since),
        "-" if not sizes else sizes[0] if sizes[0] == sizes[-1] else f"{sizes[0].split()[0]}-{sizes[-1]}",
        util,
        _describe_holder(holders, now, _MAX_COMMAND if wide else _MAX_COMMAND_NARROW),
    ]


def _describe_holder(holders: Sequence[Holder], now: float, max_command: int) -> str:
    holder = holders[0]
    match holder.kind:
        case HolderKind.HIDDEN if holder.pids:
            return f"{plural(len(holder.pids), 'process', 'processes')} without a name"
        case HolderKind.HIDDEN:
            return "memory in use, but the driver lists no process"
        case HolderKind.PROCESS:
            # Equal commands share a row, so only a single process has a pid.
            name = holder.name if len(holder.name) <= max_command else f"{holder.name[: max_command - 3]}..."
            count = len(holder.pids)
            if count > 1:
                return f"{count} x {name}"
            return f"pid {holder.pids[0]}: {name}" if len(holders) == 1 else name
        case HolderKind.RESERVATION:
            until = "" if holder.until is None else f" until {_format_time(holder.until, now)}"
            return f"reserved{until}{f': {holder.note}' if holder.note else ''}"
        case HolderKind.WAITING:
            return f"{holder.name} waits"
        case HolderKind.RUN:
            steps = [h.step for h in holders if h.step is not None]
            parts = [
                f"run {holder.name or '(without a name)'}",
                f"step {min(steps)}" if steps else "",
                "" if holder.gpus or holder.workers is None else plural(holder.workers, "worker"),
                "" if holder.is_here or not holder.head else f"from {holder.head}",
            ]
            return ", ".join(filter(None, parts))


def _format_time(time: float, now: float) -> str:
    at, today = datetime.fromtimestamp(time).astimezone(), datetime.fromtimestamp(now).astimezone()
    return f"{at:%H:%M}" if at.date() == today.date() else f"{at:%m-%d %H:%M}"


def _describe_totals(nodes: Sequence[NodeUse], now: float) -> str:
    reached = [node for node in nodes if not node.error]
    gpus, free = sum(len(node.gpus) for node in reached), sum(len(node.free_gpus) for node in reached)
    idle = sum(len(h.gpus) for node in reached for h in node.holders if h.is_idle(now))
    parts = [
        f"{sum(node.is_free for node in reached)} of {plural(len(nodes), 'node')} free",
        f"{free} of {plural(gpus, 'GPU')} free" if gpus else "",
        f"{plural(idle, 'GPU')} held without use" if idle else "",
        f"{plural(len(nodes) - len(reached), 'node')} without an answer" if len(reached) < len(nodes) else "",
    ]
    return ", ".join(filter(None, parts))


def node_use_json(nodes: Sequence[NodeUse], now: float) -> list[dict[str, Any]]:
    """Return the output of `who --json`; `now` is the head's wall clock."""
    return [
        {
            "node": node.node,
            "error": node.error or None,
            "gpus": list(node.gpus),
            "free_gpus": list(node.free_gpus),
            "free": node.is_free,
            "holders": [_holder_json(holder, now) for holder in node.holders],
            "notes": list(node.notes),
        }
        for node in nodes
    ]


def _holder_json(holder: Holder, now: float) -> dict[str, Any]:
    times = {key: None if (at := getattr(holder, key)) is None else format_rfc3339(at) for key in _TIMES}
    return {**asdict(holder), "kind": holder.kind.value, **times, "idle": holder.is_idle(now)}
