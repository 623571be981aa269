"""`why` as people read it: the verdict first, then who, who waits where, and what to type next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.render.terminal.console import BOLD, DIM, GREEN, RED, YELLOW, safe
from clusterctl.why.verdict import Confidence, Kind
from clusterctl.why.verdict_text import verdict_lines

if TYPE_CHECKING:
    from clusterctl.render.terminal.console import Terminal
    from clusterctl.why.verdict import Verdict


def render_why(verdict: Verdict, terminal: Terminal) -> list[str]:
    """Return a verdict in lines."""
    if verdict.kind is Kind.NONE:
        return [f"{terminal.style(terminal.glyphs.ok, GREEN)} {safe(verdict.summary)}"]
    colour = RED if verdict.confidence in (Confidence.CERTAIN, Confidence.LIKELY) else YELLOW
    (_, first), *rest = verdict_lines(verdict)
    head, _, summary = first.partition(": ")
    return [
        f"{terminal.style(safe(head), BOLD, colour)}: {safe(summary)}",
        *(f"  {terminal.style(f'{label:6}', DIM)} {safe(text)}" for label, text in rest),
    ]
