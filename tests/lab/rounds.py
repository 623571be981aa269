"""What came of the rounds of the random killer: each by itself, and all of a world in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

NOBODY: Final = "none was there"
HEADLINE: Final = "world | rounds | killed | left | lost | touched | failed | seconds"


class Wrong(Enum):
    """In which way a round is bad."""

    LEFT = "left"
    LOST = "lost"
    TOUCHED = "touched"
    FAILED = "failed"


@dataclass
class Round:
    """What was done, and what was found wrong; the last one, without a number, is the end of the neighbour."""

    number: int | None
    kind: str = ""
    victim: str = NOBODY
    after: float = 0.0
    seconds: float = 0.0
    problems: list[tuple[Wrong, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What its files are called by."""
        return "neighbour" if self.number is None else f"round-{self.number}"

    def __str__(self) -> str:
        verdict = "; ".join(f"{wrong.value}: {what}" for wrong, what in self.problems) or "ok"
        killed = f"{self.kind} ({self.victim}) at {self.after:.2f} s, " if self.kind else ""
        return f"{self.name}: {killed}{self.seconds:.1f} s: {verdict}"


def row(world: str, played: Sequence[Round]) -> str:
    """Return a line of the table: in how many rounds was which thing wrong."""
    rounds = [one for one in played if one.number is not None]
    killed = sum(one.victim != NOBODY for one in rounds)
    bad = [sum(any(wrong is kind for kind, _ in one.problems) for one in played) for wrong in Wrong]
    seconds = sum(one.seconds for one in played)
    return " | ".join(map(str, (world, len(rounds), killed, *bad, f"{seconds:.0f}")))
