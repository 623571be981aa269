"""A line of worker output, and the query that selects lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

Skew = Callable[[str], float]
"""Returns how many seconds the wall clock of a node is ahead of the head's; 0 if it was not measured."""


class LogLine(NamedTuple):
    """One line of one worker. A named tuple, because a flood makes hundreds of thousands a second.

    Attributes:
        time: Wall clock of the head when the line was complete, in seconds: the node's clock minus its measured offset.
            Exact to 250 ms after a pause, else to 1 s.
        node: Name of the node.
        rank: Rank of the worker.
        attempt: The attempt of the worker.
        text: The line without its end; safe for a terminal unless it was read raw.
        partial: The line has no end: a progress bar frame, the last line of a file, or a piece of a raw line.
    """

    time: float
    node: str
    rank: int
    attempt: int
    text: str
    partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Selects lines; `None` means no restriction.

    Attributes:
        since: Wall clock in seconds; earlier lines are excluded.
        until: Wall clock in seconds; later lines are excluded.
        grep: Searched in the text without its colours.
        tail: Only the last N of the selected lines (history only, not new lines).
        raw: Byte-exact text (undecodable bytes as surrogate escapes), not sanitized; a long line comes in pieces.
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
        """Return whether the file may contain selected lines."""
        return (
            (self.ranks is None or rank in self.ranks)
            and (self.nodes is None or node in self.nodes)
            and (self.attempt is None or attempt == self.attempt)
        )

    def wants_time(self, time: float) -> bool:
        """Return whether lines of that time are selected."""
        return (self.since is None or time >= self.since) and (self.until is None or time <= self.until)
