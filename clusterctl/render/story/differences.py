"""What was different between two runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from clusterctl.render.ranks import fold_nodes
from clusterctl.render.terminal.console import BOLD
from clusterctl.render.terminal.table import Cell, Column, render_table
from clusterctl.run.record.kept.portrait import Section
from clusterctl.wording import plural

if TYPE_CHECKING:
    from clusterctl.render.terminal.console import Terminal
    from clusterctl.run.record.kept.portrait import Portrait

_MOST_ROWS = 24
"""Rows of a section that people are shown; `--json` has all."""
_ABSENT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that two runs differ in, with the nodes on which they do so alike; `None`: it was not there."""

    section: Section
    what: str
    nodes: tuple[str, ...]
    left: str | None
    right: str | None


def differences(left: Portrait, right: Portrait) -> list[Difference]:
    """Return what differs, by section; what is alike on several nodes once."""
    looked_at = left.looked_at and right.looked_at
    found: dict[tuple[Section, str, str, str], tuple[list[str], str | None, str | None]] = {}
    for key in dict.fromkeys([*left.facts, *right.facts]):
        if key.section in (Section.VERSIONS, Section.HEALTH) and not looked_at:
            continue
        one, two = left.facts.get(key), right.facts.get(key)
        marks = tuple("\0" if said is None else said.mark or said.shown for said in (one, two))
        if marks[0] != marks[1]:
            shown = tuple(None if said is None else said.shown for said in (one, two))
            entry = found.setdefault((key.section, key.what, marks[0], marks[1]), ([], shown[0], shown[1]))
            entry[0].extend([key.node] if key.node is not None else [])
    rows = [
        Difference(section=section, what=what, nodes=tuple(nodes), left=one, right=two)
        for (section, what, _, _), (nodes, one, two) in found.items()
    ]
    if left.looked_at != right.looked_at:
        words = tuple("checked" if one.looked_at else "not checked" for one in (left, right))
        rows.append(
            Difference(section=Section.HEALTH, what="nodes before the start", nodes=(), left=words[0], right=words[1])
        )
    order = list(Section)
    return sorted(rows, key=lambda row: order.index(row.section))


def render_differences(left: Portrait, right: Portrait, terminal: Terminal) -> list[str]:
    """Return a table with a part for each section in which the runs differ."""
    columns = [
        Column(title="", shrink=True),
        Column(title=left.run, shrink=True),
        Column(title=right.run, shrink=True),
    ]
    rows: list[list[Cell | str]] = []
    for section, group in groupby(differences(left, right), key=lambda row: row.section):
        found = list(group)
        rows.append([Cell(section.value, (BOLD,)), "", ""])
        rows += [[f"  {_name(row)}", row.left or _ABSENT, row.right or _ABSENT] for row in found[:_MOST_ROWS]]
        if len(found) > _MOST_ROWS:
            rows.append([f"  and {len(found) - _MOST_ROWS} more (--json)", "", ""])
    if not rows:
        return [f"{left.run} and {right.run} do not differ in anything that is known of them"]
    return [line.rstrip() for line in render_table(columns, rows, terminal)]


def _name(row: Difference) -> str:
    if not row.nodes:
        return row.what
    names = fold_nodes(row.nodes)
    return f"{row.what} on {names if len(names) <= 24 else plural(len(row.nodes), 'node')}"


def differences_json(left: Portrait, right: Portrait) -> dict[str, Any]:
    """Return all that differs, for machines."""
    return {
        "runs": [left.run, right.run],
        "differences": [
            {
                "section": row.section.value,
                "what": row.what,
                "nodes": list(row.nodes),
                "values": [row.left, row.right],
            }
            for row in differences(left, right)
        ],
    }
