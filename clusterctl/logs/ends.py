"""The ends of ranks that failed, in their place among the lines of the ranks that are shown in full."""

from __future__ import annotations

import heapq
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from clusterctl.logs.fold import FoldedLine, fold_history
from clusterctl.logs.line import LogLine, LogQuery
from clusterctl.logs.merge import history, matching, open_streams, read_lines
from clusterctl.logs.output_files import OutputFiles

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from clusterctl.agent.protocol.events import Exited
    from clusterctl.logs.line import Skew
    from clusterctl.logs.select import FailingEnds

_WIDEN = 8

Ends = list[LogLine]


def ends_of(
    run_dir: str | os.PathLike[str],
    query: LogQuery,
    exits: Iterable[tuple[str, float, Exited]],
    failing: FailingEnds,
    *,
    skew: Skew | None = None,
) -> Ends:
    """Return the ends of ranks that failed, in the order of time; equal ones together, so that they fold.

    Args:
        run_dir: The run directory on the head.
        query: Which lines are wanted; its pattern, attempt and times count here too.
        exits: Node, wall clock of the head and event of each worker that is gone.
        failing: Which of them are shown.
        skew: How far clocks of nodes are ahead.
    """
    blocks: dict[tuple[int, tuple[str, ...]], list[Ends]] = {}
    for exit_ in exits:
        lines = failing.lines([exit_])
        if lines and query.attempt in (None, lines[0].attempt):
            texts = tuple(line.text for line in lines)
            blocks.setdefault((lines[0].attempt, texts), []).append(_timed(run_dir, lines, skew))
    out: Ends = []
    for alike in blocks.values():
        first = min(lines[0].time for lines in alike)
        out += [line._replace(time=first) for lines in alike for line in lines]
    wanted = [line for line in sorted(out, key=attrgetter("time")) if query.wants_time(line.time)]
    return matching(wanted, query)


def _timed(run_dir: str | os.PathLike[str], lines: Ends, skew: Skew | None) -> Ends:
    """Return lines with the time at which the last of them was written: the one that every view of it shows."""
    last = lines[-1]
    query = LogQuery(tail=1)
    streams = open_streams([OutputFiles(run_dir).expect(last.node, last.attempt, last.rank)], query, skew)
    written = next(history(streams, query, flush=True), None)
    return lines if written is None else [line._replace(time=written.time) for line in lines]


def in_place(lines: Iterable[LogLine], ends: Ends) -> Iterator[LogLine]:
    """Yield lines and ends in the order of time."""
    return heapq.merge(lines, ends, key=attrgetter("time"))


def last_folded(
    run_dir: str | os.PathLike[str], query: LogQuery, ends: Ends, *, skew: Skew | None = None
) -> Iterator[FoldedLine] | Sequence[FoldedLine]:
    """Return lines and ends as they are shown: folded, and of these the last `query.tail` where that is set."""
    if query.tail is None:
        return fold_history(in_place(read_lines(run_dir, query, skew=skew), ends))
    window = query.tail
    while True:
        read = list(read_lines(run_dir, replace(query, tail=window), skew=skew))
        whole = len(read) < window
        # What is older than the oldest line that was read has no place among these.
        near = ends if whole or not read else [line for line in ends if line.time >= read[0].time]
        folded = list(fold_history(in_place(read, near)))
        if whole or len(folded) >= query.tail:
            return folded[len(folded) - query.tail :] if len(folded) > query.tail else folded
        window = max(window, 1) * _WIDEN
