"""A symptom in one sample of a running job. Each family of checks defines its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterctl.health.model import Action, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One symptom in one sample.

    Attributes:
        gpu: Index of the GPU; `None` for a symptom of the node.
        check: The check that finds the same problem before a run, with a finer part after a blank.
        words: What is wrong, without the place.
        action: What to do.
        lasting: Seconds that it must last before it is reported.
        detail: Additional text after `words`.
        event: It happened once: later samples do not show it.
        mends: An event that is over once the GPU has been healthy for a while, because a reset repairs it.
        rule: A finer name for `health.ignore` and `health.severity`.
        leave_out: No reason to stop a run, but the next attempt should avoid the node.
    """

    gpu: int | None
    check: str
    status: Status
    words: str
    action: Action
    lasting: float = 0.0
    detail: str = ""
    event: bool = False
    mends: bool = False
    rule: str | None = None
    leave_out: bool = False
