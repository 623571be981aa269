"""Reads the existing lines of many output files, merged in the order of time."""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter

from clusterctl.logs.log_line import LogLine, LogQuery, Skew
from clusterctl.logs.output_stream import LineBatch, OutputStream, find_line_start, find_tail_start, open_streams
from clusterctl.logs.replica_finder import OutputFileFinder

_WINDOW_GROWTH = 8
_MIN_LINES_PER_STREAM = 4
"""Minimum number of lines that are first read from each stream to find the last lines of all streams."""


def read_lines(run_dir: str | os.PathLike[str], query: LogQuery, *, skew: Skew | None = None) -> Iterator[LogLine]:
    """Yield the existing lines of a run in the order of time, also unfinished last lines.

    Args:
        run_dir: The run directory on the head.
        query: Selects the lines.
        skew: Clock offset of each node; `None` if there are no offsets.
    """
    streams = open_streams(OutputFileFinder(run_dir).find_new_files(), query, skew)
    return read_history(streams, query, flush=True)


def read_history(streams: Sequence[OutputStream], query: LogQuery, *, flush: bool) -> Iterator[LogLine]:
    """Yield the selected lines of streams in the order of time, up to the current sizes of the files.

    Args:
        streams: New streams. Later reads of these streams continue after the yielded lines.
        query: Selects the lines.
        flush: Yield unfinished last lines too; otherwise these lines stay in their streams.
    """
    bounds = [_find_bounds(stream, query) for stream in streams]
    starts, ends = [start for start, _ in bounds], [end for _, end in bounds]
    if query.tail is None:
        yield from _merged(streams, starts, ends, query, flush=flush)
        return
    if query.grep is None and query.tail:
        yield from _last_lines(streams, starts, ends, query, query.tail, flush=flush)
        return
    window = query.tail
    while True:
        moved = [
            max(start, find_tail_start(stream.file.path, end, window)) if end else 0
            for stream, start, end in zip(streams, starts, ends, strict=True)
        ]
        last = deque(_merged(streams, moved, ends, query, flush=flush), maxlen=query.tail)
        # Read further back, because the pattern may have rejected lines.
        if query.grep is None or len(last) == query.tail or moved == starts:
            yield from last
            return
        window = max(window, 1) * _WINDOW_GROWTH


def _last_lines(
    streams: Sequence[OutputStream],
    starts: Sequence[int],
    ends: Sequence[int],
    query: LogQuery,
    tail: int,
    *,
    flush: bool,
) -> list[LogLine]:
    """Return the last `tail` lines of all streams. First read few lines of each stream, then more if necessary."""
    window = min(tail, max(_MIN_LINES_PER_STREAM, 2 * tail // max(1, len(streams))))
    read: list[list[LineBatch]] = [[]] * len(streams)
    begun = [0] * len(streams)
    unsure = [number for number, end in enumerate(ends) if end]
    while True:
        for number in unsure:
            stream, end = streams[number], ends[number]
            begun[number] = max(starts[number], find_tail_start(stream.file.path, end, window))
            stream.restart(begun[number])
            read[number] = list(_batches(stream, end, flush=flush))
        batches = sorted(chain.from_iterable(read), key=attrgetter("time"))
        wanted = (line for batch in batches if query.wants_time(batch.time) for line in batch.lines)
        last = list(deque(wanted, maxlen=tail))
        oldest = last[0].time if len(last) == tail else float("-inf")
        # In a stream, the unread lines are not later than the first line that was read.
        unsure = [
            number
            for number in unsure
            if begun[number] > starts[number] and (not read[number] or read[number][0].time >= oldest)
        ]
        if not unsure or window >= tail:
            return last
        window = min(tail, window * _WINDOW_GROWTH)


def _merged(
    streams: Sequence[OutputStream], starts: Sequence[int], ends: Sequence[int], query: LogQuery, *, flush: bool
) -> Iterator[LogLine]:
    parts = []
    for stream, start, end in zip(streams, starts, ends, strict=True):
        stream.restart(start)
        parts.append(_batches(stream, end, flush=flush))
    for batch in heapq.merge(*parts, key=attrgetter("time")) if len(parts) > 1 else (parts[0] if parts else ()):
        if query.wants_time(batch.time):
            yield from query.filter_lines(batch.lines)


def _batches(stream: OutputStream, end: int, *, flush: bool) -> Iterator[LineBatch]:
    try:
        # Bytes that the index does not cover get the time of the last write to the replica.
        now = os.stat(stream.file.path).st_mtime
    except FileNotFoundError:
        now = time.time()
    yield from stream.read(end, now)
    if flush and (batch := stream.flush(now)):
        yield batch


def _find_bounds(stream: OutputStream, query: LogQuery) -> tuple[int, int]:
    """Return start and end of the part of a file that may contain lines of the selected times."""
    start, end = 0, stream.size()
    until = None if query.until is None else stream.find_size_until(query.until)
    if until is not None and until < end:
        end = find_line_start(stream.file.path, until)
    if query.since is not None and end:
        start = find_line_start(stream.file.path, min(end, stream.find_size_before(query.since)))
    return start, end
