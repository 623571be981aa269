"""What of a run's output a person has before them when its report is written below it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.logs.fold import FoldedLine
from clusterctl.logs.sanitize import clean_block, strip_colours
from clusterctl.render.story.trace import raised

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.logs.line import LogLine
    from clusterctl.run.rules.blame import Cause

_ON_A_SCREEN = 100
"""So many lines a person is taken to have before them."""


class LastLines:
    """The last lines of output that were written to a screen."""

    def __init__(self) -> None:
        self._lines: deque[LogLine | FoldedLine] = deque(maxlen=_ON_A_SCREEN)

    def add(self, lines: Sequence[LogLine | FoldedLine]) -> None:
        """Take note of lines that were written."""
        self._lines.extend(lines[-_ON_A_SCREEN:])

    def of(self, attempt: int) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Return ranks and text of each line of an attempt, the oldest first."""
        return tuple(
            (line.ranks if isinstance(line, FoldedLine) else (line.rank,), line.text)
            for line in self._lines
            if line.attempt == attempt
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Output that stands on the screen.

    Attributes:
        ranks: Those whose output stands there in full.
        lines: The last lines there of the attempt that ended, the oldest first, each with its ranks.
    """

    ranks: frozenset[int] = frozenset()
    lines: tuple[tuple[tuple[int, ...], str], ...] = ()

    def traceback_of(self, cause: Cause) -> int | None:
        """Return a rank by whose output the traceback of a failure stands there, `None` where it does not.

        It is enough that another rank raised the same in the same line of the same function.
        """
        if cause.rank is not None and cause.rank in self.ranks:
            return cause.rank
        wanted = raised(clean_block((cause.traceback or "").encode("utf-8", "replace")))
        if wanted is None:
            return None
        for rank in sorted({rank for ranks, _ in self.lines for rank in ranks}):
            if wanted == raised([strip_colours(text) for ranks, text in self.lines if rank in ranks]):
                return rank
        return None

    def says(self, rank: int, lines: Sequence[str]) -> bool:
        """Return whether the last of these lines of a rank stands there as its own, and so what it said before."""
        own = [strip_colours(text) for ranks, text in self.lines if rank in ranks]
        return rank in self.ranks and bool(lines) and lines[-1] in own
