"""What `why` answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


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
