"""The verdict of `why`, and its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from clusterctl.formatting import fold_ranks

MAX_NAMED = 8
"""The most culprits of a verdict."""
_MAX_TEXT = 160


class Kind(str, Enum):
    """What went wrong, at large."""

    HANG = "hang"
    CRASH = "crash"
    SLOW = "slow"
    START = "start"
    REFUSED = "refused"
    NONE = "none"


class Confidence(str, Enum):
    """How far a verdict can be trusted.

    `certain` rests on a fact that allows nothing else, `likely` on signs that agree; below it no single name is given.
    """

    CERTAIN = "certain"
    LIKELY = "likely"
    AMBIGUOUS = "ambiguous"
    UNKNOWN = "unknown"


class Class(str, Enum):
    """What it is. The first part is for hangs, the second for ends of workers, the third for the rest."""

    NOT_JOINED = "NOT_JOINED"
    MISMATCH = "MISMATCH"
    DEADLOCK = "DEADLOCK"
    EXITED_EARLY = "EXITED_EARLY"
    STOPPED = "STOPPED"
    DSTATE = "DSTATE"
    GIL_HELD = "GIL_HELD"
    NETWORK = "NETWORK"
    STORAGE = "STORAGE"
    ALL_JOINED = "ALL_JOINED"
    STORE_LOST = "STORE_LOST"
    NODE_LOST = "NODE_LOST"
    NOT_STARTED = "NOT_STARTED"
    SLOW = "SLOW"
    NONE = "NONE"

    EXCEPTION = "EXCEPTION"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    SIGNAL = "SIGNAL"
    KILLED = "KILLED"
    SHARED_MEMORY = "SHARED_MEMORY"
    PEER_LOST = "PEER_LOST"
    DISK_FULL = "DISK_FULL"
    COMMAND_NOT_FOUND = "COMMAND_NOT_FOUND"
    MISSING_MODULE = "MISSING_MODULE"
    MISSING_FILE = "MISSING_FILE"
    NO_PERMISSION = "NO_PERMISSION"
    WRONG_ARGUMENT = "WRONG_ARGUMENT"
    NO_INPUT = "NO_INPUT"
    PORT_TAKEN = "PORT_TAKEN"
    GPU = "GPU"
    UNKNOWN = "UNKNOWN"

    REFUSED = "REFUSED"
    UNHEALTHY = "UNHEALTHY"
    TIME_LIMIT = "TIME_LIMIT"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Who began it.

    Attributes:
        rank: `None` where it is a whole node.
        where: Line of code, `file:line`; `None` where it is not known.
        op: What was being done there: a collective, or a call.
        evidence: Why it is this one, in words.
    """

    rank: int | None
    node: str | None
    where: str | None = None
    op: str | None = None
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Ranks that wait at one place, or ended because of the culprit."""

    ranks: str
    where: str | None
    op: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer.

    Attributes:
        summary: One sentence for people.
        culprits: Several where several began it alike, or where it cannot be told apart; none where nobody can tell.
        missing: Evidence that was not there, and why.
        next: Commands to type next.
        bundle: Where the evidence lies.
    """

    kind: Kind
    cls: Class
    confidence: Confidence
    summary: str
    culprits: tuple[Culprit, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    missing: tuple[str, ...] = ()
    next: tuple[str, ...] = ()
    bundle: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return `why --json`."""
        return {
            "kind": self.kind.value,
            "class": self.cls.value,
            "confidence": self.confidence.value,
            "summary": self.summary,
            "culprits": [asdict(culprit) for culprit in self.culprits],
            "waiting": [asdict(waiting) for waiting in self.waiting],
            "missing": list(self.missing),
            "next": list(self.next),
            "bundle": self.bundle,
        }


def ranks_phrase(ranks: Iterable[int], nodes: Iterable[str] = ()) -> str:
    """Return ranks for a sentence; with their node, if all `nodes` are the same."""
    numbers, places = list(ranks), set(nodes)
    on = f" on {places.pop()}" if len(places) == 1 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {fold_ranks(numbers)}{on}"


def shorten(text: str) -> str:
    """Return what a rank said, no longer than a line of a verdict has room for."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


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
