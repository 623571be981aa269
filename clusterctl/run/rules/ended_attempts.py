"""The attempts of a run that are over: what each of them came to, as the journal keeps it once another follows. Pure.

The nodes' journals tell of the newest attempt alone: what is known of an earlier one has been written down at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from clusterctl.run.rules.blame import Cause

_KEPT = ("kind", "node", "rank", "exit_code", "signal", "message", "certain")
_LONGEST_MESSAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """An attempt that another followed. Times are the head's.

    Attributes:
        why: The word of `restart.on` for its end.
        cause: The first observed failure, without its traceback; `None` where an older controller wrote the journal.
        step: What its slowest rank had reached.
        resume_from: The checkpoint that it was told to go on from.
    """

    number: int
    began: float | None
    ended: float
    why: str = ""
    cause: Cause | None = None
    step: int | None = None
    resume_from: str | None = None


def cause_record(cause: Cause | None) -> dict[str, Any] | None:
    """Return a cause as the journal keeps it; its traceback lies with the output of the attempt."""
    if cause is None:
        return None
    return {key: getattr(replace(cause, message=cause.message[:_LONGEST_MESSAGE]), key) for key in _KEPT}


def cause_of(record: dict[str, Any] | None) -> Cause | None:
    """Return the cause that a journal keeps; what only a newer controller knows of it is left out."""
    return None if record is None else Cause(**{key: record[key] for key in _KEPT if key in record})
