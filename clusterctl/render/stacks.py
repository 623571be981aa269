"""`stacks`: where every rank is, equal stacks once under the ranks that share them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.render.ranks import fold_ranks
from clusterctl.render.terminal.console import BOLD, DIM, YELLOW, safe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from clusterctl.render.terminal.console import Terminal

_STATES = {"T": "stopped", "t": "stopped by a tracer", "D": "in an uninterruptible wait", "Z": "dead, not waited for"}


def render_stacks(folded: Iterable[Mapping[str, Any]], terminal: Terminal) -> list[str]:
    """Return the stacks, most recent call first.

    Args:
        folded: What `clusterctl.run.rules.rank_stacks.fold` gave.
        terminal: Where they will stand.
    """
    lines: list[str] = []
    for entry in folded:
        lines += ["", *_entry(entry, terminal)] if lines else _entry(entry, terminal)
    return lines


def _entry(entry: Mapping[str, Any], terminal: Terminal) -> list[str]:
    word = "rank" if entry["ranks"].isdigit() else "ranks"
    state = ", ".join(_STATES.get(letter, f"state {letter}") for letter in (entry["state"] or "?").split(","))
    where = f", in {safe(entry['wchan'])}" if entry["wchan"] else ""
    ranks = terminal.style(f"{word} {entry['ranks']}", BOLD)
    head = f"{ranks}  {state}{where}, by {safe(entry['source'])}"
    if entry["frames"] is None:
        return [head, "    no Python stack"]
    return [head, *(f"    {safe(f['function'])}  {terminal.style(_place(f), DIM)}" for f in entry["frames"])]


def _place(frame: Mapping[str, Any]) -> str:
    return f"{safe(frame['file'])}:{frame['line']}"


def render_remarks(ranks: Mapping[str, Mapping[str, Any]], terminal: Terminal) -> list[str]:
    """Return what the stacks do not tell: why a rank has none, and children that do not run (data-loading workers).

    Args:
        ranks: Rank to its evidence, as the nodes gave it.
        terminal: Where it will stand.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, evidence in ranks.items():
        for text in _remarks(evidence):
            ranks_of.setdefault(text, []).append(int(rank))
    word = terminal.style("note", YELLOW)
    return [f"{word}: {_named(members)}: {safe(text)}" for text, members in ranks_of.items()]


def _remarks(evidence: Mapping[str, Any]) -> list[str]:
    reasons: Sequence[str] = evidence.get("why") or ()
    remarks = [f"no Python stack ({'; '.join(reasons)})"] if evidence["source"] == "proc" and reasons else []
    remarks += [evidence["error"]] if "error" in evidence else []
    children: Sequence[Mapping[str, Any]] = evidence.get("children") or ()
    return remarks + [
        f"its child {child['pid']} (`{child['command'] or child['name']}`) is {_STATES[child['state']]}"
        for child in children
        if child["state"] in _STATES
    ]


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {fold_ranks(ranks)}"
