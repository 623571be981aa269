"""A verdict in lines: what each of them tells, and its words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.why.verdict import Culprit, Verdict, Waiting

HEAD = ""
_MOST, _MOST_UNSEEN = 6, 3


def lines(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield label and text of each line, the most telling first; the label of the first is `HEAD`."""
    yield HEAD, f"{verdict.kind.value} {verdict.cls.value}, {verdict.confidence.value}: {verdict.summary}"
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


def _culprit(culprit: Culprit, summary: str) -> str:
    who = culprit.node or "" if culprit.rank is None else f"rank {culprit.rank} {culprit.node or ''}".rstrip()
    place = " ".join(part for part in (culprit.where, f"in {culprit.op}" if culprit.op else None) if part)
    evidence = "" if culprit.evidence in summary else culprit.evidence
    return "  ".join(part for part in (who, place, evidence) if part)


def _waiting(waiting: Waiting) -> str:
    word = "rank" if waiting.ranks.isdigit() else "ranks"
    place = " ".join(part for part in (waiting.where, waiting.op) if part)
    return "  ".join(part for part in (f"{word} {waiting.ranks}", place) if part)
