"""The types of a line of worker output, and of a query that selects lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from clusterctl.logs.safe_text import strip_colours

Skew = Callable[[str], float]
"""A function that takes a node and returns how many seconds the clock of the node is ahead of the head's; 0 if
unknown."""


class LogLine(NamedTuple):
    """One line of one worker.

    The class is a named tuple, because workers may write hundreds of thousands of lines a second.

    Attributes:
        time: Wall clock of the head in seconds at which the line was complete: the node's clock minus its measured
            offset. The error is at most 250 ms after a pause of the worker, else 1 s.
        node: Name of the node.
        rank: Rank of the worker.
        attempt: The attempt of the worker.
        text: The line without its line end; safe for a terminal, unless the query has `raw`.
        partial: The line has no line end: a frame of a progress bar, the last line of a file, or a part of a raw line.
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
        grep: Pattern that must match a part of the text without colours.
        tail: Number of last selected lines. `tail` applies only to existing lines, not to new lines.
        raw: The text contains all bytes of the output, not sanitized; undecodable bytes are surrogate escapes. A long
            line is returned in parts.
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
        """Return whether the query selects lines of this time."""
        return (self.since is None or time >= self.since) and (self.until is None or time <= self.until)

    def filter_lines(self, lines: list[LogLine]) -> list[LogLine]:
        """Return the lines that match the pattern."""
        if self.grep is None:
            return lines
        search = self.grep.search
        return [line for line in lines if search(strip_colours(line.text))]
