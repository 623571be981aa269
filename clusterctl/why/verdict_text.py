"""A verdict in lines: what each of them tells, and its words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.why.exit_causes import shorten
from clusterctl.why.verdict import Confidence, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.why.verdict import Culprit, Verdict, Waiting

FIRST_LABEL = ""
_MOST, _MOST_UNSEEN, _MOST_BRIEF = 6, 3, 3


def verdict_lines(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield label and text of each line, the most telling first; the label of the first is `HEAD`."""
    yield FIRST_LABEL, f"{verdict.kind.value} {verdict.cls.value}, {verdict.confidence.value}: {verdict.summary}"
    for culprit in verdict.culprits[:_MOST]:
        yield "who", _culprit(culprit, verdict.summary)
    if len(verdict.culprits) > _MOST:
        yield "who", f"and {len(verdict.culprits) - _MOST} more"
    for waiting in verdict.waiting[:_MOST]:
        yield "waits", _waiting(waiting)
    for missing in verdict.missing[:_MOST_UNSEEN]:
        yield "unseen", missing
    for command in verdict.next:
        yield "next", command
    if verdict.bundle:
        yield "seen", verdict.bundle


def brief_lines(verdict: Verdict, run: str, *, steps: bool = True, said: str = "") -> list[str]:
    """Return the short form, five lines at most, for whoever watches a run; nothing where nothing went wrong.

    Args:
        verdict: What went wrong.
        run: Its id.
        steps: Tell what to type next; else that stands beside it, and the first line says what begins here.
        said: The error that stands beside it, and is not said again; nor is who failed, where that is certain.
    """
    if verdict.kind is Kind.NONE:
        return []
    by_label: dict[str, list[str]] = {}
    for label, text in verdict_lines(verdict):
        by_label.setdefault(label, []).append(text)
    whole = by_label[FIRST_LABEL][0]
    head, _, advice = whole.partition(f": {shorten(said)}") if said else (whole, "", "")
    if advice and not advice.startswith("; "):
        head, advice = whole, ""
    is_said = head != whole
    head += advice
    if not steps and verdict.kind is Kind.CRASH and verdict.confidence is Confidence.CERTAIN and is_said:
        # Who failed and how stands beside it.
        place = _place(verdict.culprits[0]) if verdict.culprits else ""
        at = f", at {place}" if place else ""
        return [f"why: {verdict.cls.value}, {verdict.confidence.value}{at}{advice}; `clusterctl why {run}` tells more"]
    shown = [label for label in ("who", "waits", "unseen", "next") if label in by_label and (steps or label != "next")]
    return [
        head if steps else f"why: {head}",
        *(f"  {label:6} {_first(by_label[label])}" for label in shown[:_MOST_BRIEF]),
        f"  `clusterctl why {run}` tells more",
    ]


def _first(texts: list[str]) -> str:
    return texts[0] + (f"; and {len(texts) - 1} more" if len(texts) > 1 else "")


def _culprit(culprit: Culprit, summary: str) -> str:
    who = culprit.node or "" if culprit.rank is None else f"rank {culprit.rank} {culprit.node or ''}".rstrip()
    place = _place(culprit)
    evidence = "" if culprit.evidence in summary else culprit.evidence
    return "  ".join(part for part in (who, place, evidence) if part)


def _place(culprit: Culprit) -> str:
    return " ".join(part for part in (culprit.where, f"in {culprit.op}" if culprit.op else None) if part)


def _waiting(waiting: Waiting) -> str:
    word = "rank" if waiting.ranks.isdigit() else "ranks"
    place = " ".join(part for part in (waiting.where, waiting.op) if part)
    return "  ".join(part for part in (f"{word} {waiting.ranks}", place) if part)
