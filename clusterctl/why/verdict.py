"""The verdict of `clusterctl why` about a run, and its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from clusterctl.formatting import name_ranks

MAX_NAMED = 8
"""The largest number of culprits in a verdict."""
_MAX_TEXT = 160


class ProblemKind(str, Enum):
    """The kind of a problem, which is the first word of a verdict."""

    HANG = "hang"
    CRASH = "crash"
    SLOW = "slow"
    START = "start"
    REFUSED = "refused"
    NONE = "none"


class Confidence(str, Enum):
    """The confidence of a verdict.

    A `certain` verdict follows from a fact that excludes all other verdicts. A `likely` verdict follows from signs that
    agree. A verdict with less confidence blames no single rank or node.
    """

    CERTAIN = "certain"
    LIKELY = "likely"
    AMBIGUOUS = "ambiguous"
    UNKNOWN = "unknown"


class Fault(str, Enum):
    """The class of a problem. First are classes of hangs, then of exits of workers, then of other ends of a run."""

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
    EXTERNAL_WAIT = "EXTERNAL_WAIT"
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
    IDLE = "IDLE"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A rank or node that is to blame.

    Attributes:
        rank: The rank; `None` for a whole node.
        where: The line of code, `file:line`; `None` if unknown.
        op: The collective or function that this line calls.
        evidence: The reason to blame the rank or node, for people.
    """

    rank: int | None
    node: str | None
    where: str | None = None
    op: str | None = None
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Ranks that wait at one position, or ended because of the culprit."""

    ranks: str
    where: str | None
    op: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judgement about what went wrong with a run.

    Attributes:
        summary: One sentence for people.
        culprits: The ranks or nodes to blame. There are several culprits if all did the same, or if the evidence is
            ambiguous.
        missing_evidence: Sentences about missing evidence and the reasons.
        next_commands: Commands to run next.
        evidence_folder: The folder with the evidence.
    """

    kind: ProblemKind
    cls: Fault
    confidence: Confidence
    summary: str
    culprits: tuple[Culprit, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    missing_evidence: tuple[str, ...] = ()
    next_commands: tuple[str, ...] = ()
    evidence_folder: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the output of `why --json`."""
        return {
            "kind": self.kind.value,
            "class": self.cls.value,
            "confidence": self.confidence.value,
            "summary": self.summary,
            **{name: [asdict(each) for each in getattr(self, name)] for name in ("culprits", "waiting")},
            "missing": list(self.missing_evidence),
            "next": list(self.next_commands),
            "bundle": self.evidence_folder,
        }


def format_ranks(ranks: Iterable[int], nodes: Iterable[str] = ()) -> str:
    """Return ranks as words for a sentence. If all `nodes` are the same, the words include the node."""
    places = set(nodes)
    return name_ranks(ranks) + (f" on {places.pop()}" if len(places) == 1 else "")


def shorten(text: str) -> str:
    """Return a text, cut to the largest length that a line of a verdict may have."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


FIRST_LABEL = ""
_MOST, _MOST_UNSEEN, _MOST_BRIEF = 6, 3, 3


def format_verdict_lines(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield label and text of each line, most important first. The label of the first line is `FIRST_LABEL`."""
    yield FIRST_LABEL, f"{verdict.kind.value} {verdict.cls.value}, {verdict.confidence.value}: {verdict.summary}"
    for culprit in verdict.culprits[:_MOST]:
        who = culprit.node or "" if culprit.rank is None else f"rank {culprit.rank} {culprit.node or ''}".rstrip()
        evidence = "" if culprit.evidence in verdict.summary else culprit.evidence
        yield "who", "  ".join(part for part in (who, _format_place(culprit), evidence) if part)
    if len(verdict.culprits) > _MOST:
        yield "who", f"and {len(verdict.culprits) - _MOST} more"
    for waiting in verdict.waiting[:_MOST]:
        ranks = f"{'rank' if waiting.ranks.isdigit() else 'ranks'} {waiting.ranks}"
        place = " ".join(part for part in (waiting.where, waiting.op) if part)
        yield "waits", "  ".join(part for part in (ranks, place) if part)
    for missing in verdict.missing_evidence[:_MOST_UNSEEN]:
        yield "unseen", missing
    for command in verdict.next_commands:
        yield "next", command
    if verdict.evidence_folder:
        yield "seen", verdict.evidence_folder


def format_brief_lines(
    verdict: Verdict, run: str, *, with_next_commands: bool = True, shown_error: str = ""
) -> list[str]:
    """Return the short form of a verdict, at most five lines; no line if nothing went wrong.

    Args:
        verdict: The verdict.
        run: The id of the run.
        with_next_commands: Include the next commands. Without them, the first line begins with "why".
        shown_error: An error that the caller shows itself. The lines repeat neither this error nor a certain culprit.
    """
    if verdict.kind is ProblemKind.NONE:
        return []
    by_label: dict[str, list[str]] = {}
    for label, text in format_verdict_lines(verdict):
        by_label.setdefault(label, []).append(text)
    whole = by_label[FIRST_LABEL][0]
    head, _, advice = whole.partition(f": {shorten(shown_error)}") if shown_error else (whole, "", "")
    if advice and not advice.startswith("; "):
        head, advice = whole, ""
    is_shown = head != whole
    head += advice
    if (
        not with_next_commands
        and verdict.kind is ProblemKind.CRASH
        and verdict.confidence is Confidence.CERTAIN
        and is_shown
    ):
        # The failed rank and its error are shown elsewhere.
        place = _format_place(verdict.culprits[0]) if verdict.culprits else ""
        at = f", at {place}" if place else ""
        return [f"why: {verdict.cls.value}, {verdict.confidence.value}{at}{advice}; `clusterctl why {run}` tells more"]
    shown = [
        label
        for label in ("who", "waits", "unseen", "next")
        if label in by_label and (with_next_commands or label != "next")
    ]
    more = {label: f"; and {len(texts) - 1} more" if len(texts) > 1 else "" for label, texts in by_label.items()}
    return [
        head if with_next_commands else f"why: {head}",
        *(f"  {label:6} {by_label[label][0]}{more[label]}" for label in shown[:_MOST_BRIEF]),
        f"  `clusterctl why {run}` tells more",
    ]


def _format_place(culprit: Culprit) -> str:
    return " ".join(part for part in (culprit.where, f"in {culprit.op}" if culprit.op else None) if part)
