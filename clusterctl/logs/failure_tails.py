"""Selects the last lines of failed ranks, which `logs` shows by default in addition to rank 0."""

from __future__ import annotations

import heapq
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from clusterctl.agent.protocol.events import Exited
from clusterctl.logs.fold import FoldedLine, fold_history
from clusterctl.logs.log_line import LogLine, LogQuery, Skew
from clusterctl.logs.merge import read_history, read_lines
from clusterctl.logs.output_stream import open_streams
from clusterctl.logs.replica_finder import OutputFileFinder
from clusterctl.logs.safe_text import clean_block, strip_colours

TAIL_LINES = 20
TRACEBACK_LINES = 60
MAX_FULL_TAILS = 4

_TRACEBACK = "Traceback (most recent call last)"


def is_failure(exited: Exited) -> bool:
    """Return whether a worker failed by itself: clusterctl did not stop this worker."""
    return not exited.stopped and (exited.signal is not None or exited.exit_code != 0 or exited.error is not None)


def select_cause_lines(tail: str) -> list[str]:
    """Return the lines with the cause of a failure: the last traceback, or else the last lines.

    Args:
        tail: The end of a failed worker's output.
    """
    lines = [line for line in clean_block(tail.encode("utf-8", "replace")) if strip_colours(line).strip()]
    begins = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if begins and len(lines) - begins[-1] <= TRACEBACK_LINES:
        # "During handling of the above exception …" chains tracebacks. The first traceback of a chain is the cause.
        return lines[max(_chain_start(lines, begins), len(lines) - TRACEBACK_LINES) :]
    return lines[-TAIL_LINES:]


def _chain_start(lines: list[str], begins: list[int]) -> int:
    start = begins[-1]
    for earlier in reversed(begins[:-1]):
        between = lines[start - 1]
        if "above exception" not in between:
            break
        start = earlier
    return start


class FailureTails:
    """Selects the last lines of each failed rank once, when the rank fails.

    The first few different tails of an attempt are complete; every other tail has one line. No method does I/O.

    Args:
        shown: Ranks whose complete output is shown, so that they need no tail; `None` for all ranks.
    """

    def __init__(self, shown: Collection[int] | None) -> None:
        self._shown = shown
        self._done: set[tuple[int, int]] = set()
        self._ends: dict[int, set[tuple[str, ...]]] = {}

    def select_lines(self, exits: Iterable[tuple[str, float, Exited]]) -> list[LogLine]:
        """Return the lines to show now, in the order of the exits.

        Args:
            exits: Node, wall clock in seconds, and event of each worker that has exited.
        """
        out: list[LogLine] = []
        for node, time, exited in exits:
            key = (exited.attempt, exited.rank)
            if key in self._done or self._shown is None or exited.rank in self._shown or not is_failure(exited):
                continue
            self._done.add(key)
            # Some frameworks print the rank before each line. Without this prefix, tails of different ranks can be
            # equal.
            last_lines = [line.removeprefix(f"[rank{exited.rank}]: ") for line in select_cause_lines(exited.tail)]
            texts = self._choose(exited.attempt, last_lines)
            out += [LogLine(time, node, exited.rank, exited.attempt, text) for text in texts]
        return out

    def _choose(self, attempt: int, lines: list[str]) -> list[str]:
        ends = self._ends.setdefault(attempt, set())
        if tuple(lines) in ends:
            return lines  # The tail will be folded with the equal tail of another rank.
        if len(ends) >= MAX_FULL_TAILS:
            return lines[-1:]
        ends.add(tuple(lines))
        return lines


_WIDEN = 8

FailureLines = list[LogLine]


def read_failure_tails(
    run_dir: str | os.PathLike[str],
    query: LogQuery,
    exits: Iterable[tuple[str, float, Exited]],
    failing: FailureTails,
    *,
    skew: Skew | None = None,
) -> FailureLines:
    """Return the last lines of failed ranks in the order of time. Equal tails are adjacent, so that they can be folded.

    Args:
        run_dir: The run directory on the head.
        query: Selects the lines by attempt, time and pattern.
        exits: Node, wall clock of the head, and event of each worker that has exited.
        failing: The object that selects the failed ranks and their lines.
        skew: Clock offset of each node.
    """
    blocks: dict[tuple[int, tuple[str, ...]], list[FailureLines]] = {}
    for exit_ in exits:
        lines = failing.select_lines([exit_])
        if lines and query.attempt in (None, lines[0].attempt):
            texts = tuple(line.text for line in lines)
            blocks.setdefault((lines[0].attempt, texts), []).append(_set_time(run_dir, lines, skew))
    out: FailureLines = []
    for alike in blocks.values():
        first = min(lines[0].time for lines in alike)
        out += [line._replace(time=first) for lines in alike for line in lines]
    wanted = [line for line in sorted(out, key=attrgetter("time")) if query.wants_time(line.time)]
    return query.filter_lines(wanted)


def _set_time(run_dir: str | os.PathLike[str], lines: FailureLines, skew: Skew | None) -> FailureLines:
    """Return `lines`; their time is that of the last line in the output file."""
    last = lines[-1]
    query = LogQuery(tail=1)
    streams = open_streams([OutputFileFinder(run_dir).expect_file(last.node, last.attempt, last.rank)], query, skew)
    written = next(read_history(streams, query, flush=True), None)
    return lines if written is None else [line._replace(time=written.time) for line in lines]


def merge_failure_lines(lines: Iterable[LogLine], ends: FailureLines) -> Iterator[LogLine]:
    """Yield lines and failure lines in the order of time."""
    return heapq.merge(lines, ends, key=attrgetter("time"))


def read_folded_lines(
    run_dir: str | os.PathLike[str], query: LogQuery, ends: FailureLines, *, skew: Skew | None = None
) -> Iterator[FoldedLine] | Sequence[FoldedLine]:
    """Return the folded lines of a run, merged with the lines of failed ranks; only the last `query.tail`, if set."""
    if query.tail is None:
        return fold_history(merge_failure_lines(read_lines(run_dir, query, skew=skew), ends))
    window = query.tail
    while True:
        read = list(read_lines(run_dir, replace(query, tail=window), skew=skew))
        whole = len(read) < window
        # Failure lines that are older than all lines read so far are not among the last lines.
        near = ends if whole or not read else [line for line in ends if line.time >= read[0].time]
        folded = list(fold_history(merge_failure_lines(read, near)))
        if whole or len(folded) >= query.tail:
            return folded[len(folded) - query.tail :] if len(folded) > query.tail else folded
        window = max(window, 1) * _WIDEN
