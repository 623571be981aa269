"""One trouble as one sample of a running job shows it; each family says which signs it knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterctl.health.model import Action, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One trouble as one sample shows it.

    Attributes:
        gpu: Index of the GPU, or `None` where it is the node's.
        check: The check that would find it before a run, with what makes it finer behind a blank.
        words: What is wrong, without the place.
        action: What to do.
        lasting: How long it has to be there before it is told, in seconds.
        detail: More, behind the words.
        event: Something that happened: the samples after it do not show it.
        mends: An event that is over once the GPU has been well for a while, since a reset repairs it.
        rule: A name for `health.ignore` and `health.severity` that is finer than the check.
        leave_out: Nothing to stop a run for, but the node is better left out of the next attempt.
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
