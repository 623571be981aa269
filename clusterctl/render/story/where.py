"""Folded stacks in a few lines: which ranks are in which function of the code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.render.story.trace import library_of
from clusterctl.render.terminal.console import safe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MOST = 3


def where_lines(folded: Sequence[Mapping[str, Any]], nodes: Mapping[int, str]) -> list[str]:
    """Return `rank 2 on gpu03 is in load (train.py:21)`, a line for each place: those with few ranks first.

    Args:
        folded: What `stalls.stacks.fold` gave.
        nodes: Rank to its node.
    """
    entries = sorted(folded, key=lambda entry: _size(entry["ranks"]))
    lines = [_line(entry, nodes) for entry in entries[:_MOST]]
    more = len(entries) - len(lines)
    return [*lines, f"and {more} other places"] if more else lines


def _line(entry: Mapping[str, Any], nodes: Mapping[int, str]) -> str:
    ranks = str(entry["ranks"])
    alone = ranks.isdigit()
    node = nodes.get(int(ranks)) if alone else None
    who = f"rank {ranks}" + (f" on {safe(node)}" if node else "") if alone else f"ranks {ranks}"
    return f"{who} {'is' if alone else 'are'} {_place(entry['frames'], entry['wchan'])}"


def _place(frames: Sequence[Mapping[str, Any]] | None, wchan: str | None) -> str:
    if not frames:
        return f"in {safe(wchan)} of the kernel" if wchan else "somewhere without a Python stack"
    own = next((frame for frame in frames if not library_of(str(frame["file"]))), frames[0])
    inside = "" if own is frames[0] else f"in {safe(frames[0]['function'])}, called by "
    name = str(own["file"]).rpartition("/")[2]
    return f"{inside or 'in '}{safe(own['function'])} ({safe(name)}:{own['line']})"


def _size(ranks: str) -> int:
    ends = [span.partition("-") for span in ranks.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)
