"""Renders the differences between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import plural
from clusterctl.render.console import BOLD, Terminal, safe
from clusterctl.render.line_wrapping import count_columns, wrap_line
from clusterctl.render.table import GAP, Cell, Column, render_table
from clusterctl.run.record.diff_properties import RunProperties, Topic

_MOST_ROWS = 24
"""The largest number of rows of a section in the table; `--json` has all rows."""
_ABSENT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference between two runs, and the nodes that differ; `None` means a missing value."""

    section: Topic
    what: str
    nodes: tuple[str, ...]
    left: str | None
    right: str | None


def list_differences(left: RunProperties, right: RunProperties) -> list[Difference]:
    """Return the differences in the order of sections; equal differences of several nodes are merged."""
    looked_at = left.has_health and right.has_health
    found: dict[tuple[Topic, str, str, str], tuple[list[str], str | None, str | None]] = {}
    for key in dict.fromkeys([*left.properties, *right.properties]):
        if key.topic in (Topic.VERSIONS, Topic.HEALTH) and not looked_at:
            continue
        one, two = left.properties.get(key), right.properties.get(key)
        marks = tuple("\0" if said is None else said.compare_key or said.shown for said in (one, two))
        if marks[0] != marks[1]:
            shown = tuple(None if said is None else said.shown for said in (one, two))
            entry = found.setdefault((key.topic, key.name, marks[0], marks[1]), ([], shown[0], shown[1]))
            entry[0].extend([key.node] if key.node is not None else [])
    rows = [
        Difference(section=section, what=what, nodes=tuple(nodes), left=one, right=two)
        for (section, what, _, _), (nodes, one, two) in found.items()
    ]
    if left.has_health != right.has_health:
        words = tuple("checked" if one.has_health else "not checked" for one in (left, right))
        rows.append(
            Difference(section=Topic.HEALTH, what="nodes before the start", nodes=(), left=words[0], right=words[1])
        )
    order = list(Topic)
    return sorted(rows, key=lambda row: order.index(row.section))


def render_differences(left: RunProperties, right: RunProperties, terminal: Terminal) -> list[str]:
    """Return a table with a part for each section that has differences.

    If two values do not fit side by side, the second is below the first. Values are not cut, because the cut part may
    be the difference.
    """
    shown = _make_rows(list_differences(left, right))
    if not shown:
        return [f"no differences are known between {left.run} and {right.run}"]
    names = (left.run, right.run)
    below = _find_wide_rows(shown, names, terminal.width)
    columns = [Column(title="", shrink=True), *(Column(title=name, shrink=True) for name in names)]
    rows: list[list[Cell | str]] = [
        [Cell(row.title, (BOLD,)) if row.heads else row.title, *(("", "") if n in below else row.values)]
        for n, row in enumerate(shown)
    ]
    header, *body = render_table(columns, rows, terminal)
    lines = [header.rstrip()]
    for number, (row, line) in enumerate(zip(shown, body, strict=True)):
        lines.append(line.rstrip())
        if number in below:
            wide = max(map(len, names))
            lines += [f"    {name:{wide}}  {safe(value)}" for name, value in zip(names, row.values, strict=True)]
    return [part for line in lines for part in wrap_line(line, terminal.width)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of the table; `heads` says whether the row is the title of a section."""

    title: str
    values: tuple[str, str] = ("", "")
    heads: bool = False


def _make_rows(found: Sequence[Difference]) -> list[_Row]:
    rows: list[_Row] = []
    for section, group in groupby(found, key=lambda row: row.section):
        of_section = list(group)
        rows.append(_Row(title=section.value, heads=True))
        rows += [
            _Row(title=f"  {_name(row)}", values=(row.left or _ABSENT, row.right or _ABSENT))
            for row in of_section[:_MOST_ROWS]
        ]
        if len(of_section) > _MOST_ROWS:
            rows.append(_Row(title=f"  and {len(of_section) - _MOST_ROWS} more (--json)"))
    return rows


def _find_wide_rows(shown: Sequence[_Row], names: tuple[str, str], width: int | None) -> set[int]:
    """Return the widest rows, whose values are placed below each other so that all other rows fit."""
    below: set[int] = set()
    title = max(count_columns(safe(row.title)) for row in shown)
    left = dict(enumerate(shown))
    while width is not None and left:
        taken = [
            max(count_columns(safe(text)) for text in (name, *(row.values[i] for row in left.values())))
            for i, name in enumerate(names)
        ]
        if title + sum(taken) + 2 * GAP <= width:
            break
        widest = max(left, key=lambda n: sum(count_columns(safe(value)) for value in left[n].values))
        if not any(left.pop(widest).values):
            break
        below.add(widest)
    return below


def _name(row: Difference) -> str:
    if not row.nodes:
        return row.what
    names = fold_hosts(row.nodes)
    return f"{row.what} on {names if len(names) <= 24 else plural(len(row.nodes), 'node')}"


def differences_json(left: RunProperties, right: RunProperties) -> dict[str, Any]:
    """Return the output of `diff --json`."""
    return {
        "runs": [left.run, right.run],
        "differences": [
            {
                "section": row.section.value,
                "what": row.what,
                "nodes": list(row.nodes),
                "values": [row.left, row.right],
            }
            for row in list_differences(left, right)
        ],
    }
