"""GPUs that a node has and a run does not get: why, and what that makes of their number."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from clusterctl.health.model import Action, fail, ok, skip, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clusterctl.health.check import View
    from clusterctl.health.model import Outcome


class Why(Enum):
    """Why a GPU that is on the PCI bus is not shown."""

    FAULT = "not shown"
    KEPT = "not given to us"
    DENIED = "closed to this user"
    UNBOUND = "without its vendor's driver"


@dataclass(frozen=True, slots=True)
class HiddenGpu:
    """A GPU that is not shown, by its PCI address."""

    address: str
    why: Why
    words: str


LOOK = "Look for the missing GPU's PCI address in the kernel log, then reboot; if it stays away it is the hardware"
ASK = "Ask the scheduler or the container for more GPUs, or declare those that are given (`gpus: N`)"


def judge_count(
    view: View, seen: int, entries: Sequence[HiddenGpu], remedies: Mapping[Why, tuple[Action, str]]
) -> Iterator[Outcome]:
    """Say whether as many GPUs are there as the cluster file declares, or as the node has.

    Args:
        view: The node.
        seen: How many its driver shows.
        entries: Those that it does not.
        remedies: What to do about each reason, the gravest first.
    """
    declared = view.expected.gpus
    needed = max(declared, default=-1) + 1 if isinstance(declared, tuple) else declared
    faults = [entry for entry in entries if entry.why is Why.FAULT]
    if needed is not None and seen < needed:
        reasons = {entry.why for entry in entries}
        action, hint = next((remedy for why, remedy in remedies.items() if why in reasons), remedies[Why.FAULT])
        message = f"{seen} of {needed} GPUs{_told(entries)}"
        yield fail(message, value=seen, expected=needed, action=action, hint=hint)
    elif faults:
        say = fail if needed is None else warn
        whole = seen + len(faults)
        yield say(f"{seen} GPUs, {whole} on the PCI bus{_told(faults)}", value=seen, expected=whole)
    elif seen == 0 and needed is None:
        yield skip(f"no GPU here and none declared{_told(entries)}")
    else:
        yield ok(f"{seen} GPUs{_told(entries)}", value=seen, expected=needed)


def _told(entries: Sequence[HiddenGpu]) -> str:
    """Name GPUs by address, those with one reason together."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        by_reason.setdefault((entry.why.value, entry.words), []).append(entry.address)
    parts = [f"{why}: {', '.join(addresses)} ({words})" for (why, words), addresses in by_reason.items()]
    return "".join(f"; {part}" for part in parts)
