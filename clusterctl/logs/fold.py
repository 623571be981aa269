"""Folds equal lines of many ranks into one line.

Each line waits for a short time for equal lines of other ranks. No line is lost or shown twice, and the lines of each
rank stay in order.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from typing import NamedTuple

from clusterctl.logs.log_line import LogLine

FOLD_WINDOW_S = 0.2
"""Seconds that a line waits for equal lines of other ranks."""

_MAX_WAITING_GROUPS = 20_000
_CHUNK = 1024


class FoldedLine(NamedTuple):
    """A line of one rank, or equal lines of several ranks.

    Attributes:
        time: Wall clock in seconds at which the first of these lines was complete.
        nodes: Names of the nodes, each once, in the order of arrival.
        ranks: The ranks, sorted.
    """

    time: float
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    attempt: int
    text: str
    partial: bool = False


@dataclass(slots=True)
class _Group:
    number: int
    born: float
    lines: list[LogLine]


_number = attrgetter("number")


class LineFolder:
    """Folds lines as they arrive. The folder reads no clock: the caller passes the time.

    Args:
        expected: Ranks that may write lines. A line stops waiting once all these ranks have written it.
        window: Seconds that a line waits.
    """

    def __init__(self, expected: frozenset[int] | None = None, *, window: float = FOLD_WINDOW_S) -> None:
        self._everyone = len(expected) if expected is not None else None
        self._window = window
        self._groups: deque[_Group] = deque()
        self._open: dict[tuple[int, str, bool], deque[_Group]] = {}
        self._newest: dict[int, int] = {}
        self._count = 0

    def feed(self, lines: Iterable[LogLine], now: float) -> list[FoldedLine]:
        """Add lines; return the folded lines that have waited long enough.

        Args:
            lines: New lines, in order for each rank.
            now: Seconds of a monotonic clock, or the time of the lines if they were written in the past.
        """
        out = self.take_due_lines(now)
        for number, line in enumerate(lines, 1):
            self._add(line, now)
            if number % _CHUNK == 0:
                out += self.take_due_lines(now)
        return out + self.take_due_lines(now)

    def take_due_lines(self, now: float) -> list[FoldedLine]:
        """Return the folded lines that have waited long enough."""
        out: list[FoldedLine] = []
        groups, window = self._groups, self._window
        everyone = self._everyone or sys.maxsize
        while groups:
            first = groups[0]
            waits = now < first.born + window and len(first.lines) < everyone and not first.lines[0].partial
            if waits and len(groups) <= _MAX_WAITING_GROUPS:
                break
            out.append(self._close())
        return out

    def flush(self) -> list[FoldedLine]:
        """Return all waiting lines, folded."""
        return [self._close() for _ in range(len(self._groups))]

    def find_next_due_time(self) -> float | None:
        """Return the time on the caller's clock at which the next line has waited long enough, or `None`."""
        return self._groups[0].born + self._window if self._groups else None

    # --- private

    def _add(self, line: LogLine, now: float) -> None:
        # Groups are returned in the order of creation. A line joins only a group that is newer than the last group of
        # the line's rank, so that the lines of each rank stay in order.
        _, _, rank, attempt, text, partial = line
        key = (attempt, text, partial)
        same = self._open.get(key)
        if same is not None and not partial:
            after = self._newest.get(rank, -1)
            if same[-1].number > after:
                group = same[bisect_right(same, after, key=_number)]
                group.lines.append(line)
                self._newest[rank] = group.number
                return
        group = _Group(self._count, now, [line])
        self._count += 1
        self._newest[rank] = group.number
        self._groups.append(group)
        if same is None:
            self._open[key] = deque([group])
        else:
            same.append(group)

    def _close(self) -> FoldedLine:
        group = self._groups.popleft()
        first = group.lines[0]
        key = (first.attempt, first.text, first.partial)
        same = self._open[key]
        if len(same) == 1:
            del self._open[key]
        else:
            same.popleft()
        if len(group.lines) == 1:
            return FoldedLine(first.time, (first.node,), (first.rank,), first.attempt, first.text, first.partial)
        nodes = tuple(dict.fromkeys(line.node for line in group.lines))
        ranks = tuple(sorted(line.rank for line in group.lines))
        return FoldedLine(min(line.time for line in group.lines), nodes, ranks, first.attempt, first.text)


def fold_history(lines: Iterable[LogLine], *, window: float = FOLD_WINDOW_S) -> Iterator[FoldedLine]:
    """Yield folded lines that were written in the past, by their own times."""
    folder = LineFolder(window=window)
    now = float("-inf")
    for time, same_time in groupby(lines, key=attrgetter("time")):
        now = max(now, time)
        while chunk := list(islice(same_time, _CHUNK)):
            yield from folder.feed(chunk, now)
    yield from folder.flush()
