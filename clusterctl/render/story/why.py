"""`why` as people read it: the verdict first, then who, who waits where, and what to type next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.render.terminal.console import BOLD, DIM, GREEN, RED, YELLOW, safe
from clusterctl.why.verdict import Confidence, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.render.terminal.console import Terminal
    from clusterctl.why.verdict import Culprit, Verdict, Waiting

_MOST = 6


def render_why(verdict: Verdict, terminal: Terminal, *, short: bool = False) -> list[str]:
    """Return a verdict in lines; `short`: the first five of them."""
    if verdict.kind is Kind.NONE:
        return [f"{terminal.style(terminal.glyphs.ok, GREEN)} {safe(verdict.summary)}"]
    lines = list(_lines(verdict, terminal))
    return lines[:5] if short else lines


def _lines(verdict: Verdict, terminal: Terminal) -> Iterator[str]:
    colour = RED if verdict.confidence in (Confidence.CERTAIN, Confidence.LIKELY) else YELLOW
    head = f"{verdict.kind.value} {verdict.cls.value}, {verdict.confidence.value}"
    yield f"{terminal.style(head, BOLD, colour)}: {safe(verdict.summary)}"
    for culprit in verdict.culprits[:_MOST]:
        yield f"  {terminal.style('who', DIM)}    {_culprit(culprit, verdict.summary)}"
    if len(verdict.culprits) > _MOST:
        yield f"         and {len(verdict.culprits) - _MOST} more"
    for waiting in verdict.waiting[:_MOST]:
        yield f"  {terminal.style('waits', DIM)}  {_waiting(waiting)}"
    for missing in verdict.missing[:3]:
        yield f"  {terminal.style('unseen', DIM)} {safe(missing)}"
    for command in verdict.next:
        yield f"  {terminal.style('next', DIM)}   {safe(command)}"
    if verdict.bundle:
        yield f"  {terminal.style('seen', DIM)}   {safe(verdict.bundle)}"


def _culprit(culprit: Culprit, summary: str) -> str:
    who = culprit.node or "" if culprit.rank is None else f"rank {culprit.rank} {culprit.node or ''}".rstrip()
    place = " ".join(part for part in (culprit.where, f"in {culprit.op}" if culprit.op else None) if part)
    evidence = "" if culprit.evidence in summary else culprit.evidence
    return safe("  ".join(part for part in (who, place, evidence) if part))


def _waiting(waiting: Waiting) -> str:
    word = "rank" if waiting.ranks.isdigit() else "ranks"
    place = " ".join(part for part in (waiting.where, waiting.op) if part)
    return safe("  ".join(part for part in (f"{word} {waiting.ranks}", place) if part))
