"""A line of a worker's output, and the question which lines are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    Skew = Callable[[str], float]
    """Returns by how many seconds the wall clock of a node is ahead of the head's; 0 where nobody has measured it."""


class LogLine(NamedTuple):
    """One line that one worker wrote. A named tuple, because a flood makes hundreds of thousands a second.

    Attributes:
        time: Wall clock of the head when the line was complete, in seconds: the node's, less what that is known to be
            ahead. Exact to 250 ms after a pause, to 1 s else.
        node: Name of the node.
        rank: Rank of the worker.
        attempt: The attempt it belongs to.
        text: The line without its end; safe for a terminal unless it was read raw.
        partial: No line end was seen: a progress bar's frame, the last line of a file, or a piece of a raw line.
    """

    time: float
    node: str
    rank: int
    attempt: int
    text: str
    partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Which lines are wanted; `None` means no restriction.

    Attributes:
        since: Wall clock in seconds; lines before it are left out.
        until: Wall clock in seconds; lines after it are left out.
        grep: Searched in the text without its colours.
        tail: Only the last so many of the lines that the rest selects (history only, never what is followed).
        raw: Byte-exact text (undecodable bytes as surrogate escapes), nothing cleaned; long lines come in pieces.
    """

    ranks: frozenset[int] | None = None
    nodes: frozenset[str] | None = None
    attempt: int | None = None
    since: float | None = None
    until: float | None = None
    grep: re.Pattern[str] | None = None
    tail: int | None = None
    raw: bool = False

    def wants_file(self, node: str, rank: int, attempt: int) -> bool:
        """Say whether any line of that file can be wanted."""
        return (
            (self.ranks is None or rank in self.ranks)
            and (self.nodes is None or node in self.nodes)
            and (self.attempt is None or attempt == self.attempt)
        )

    def wants_time(self, time: float) -> bool:
        """Say whether lines of that time are wanted."""
        return (self.since is None or time >= self.since) and (self.until is None or time <= self.until)
