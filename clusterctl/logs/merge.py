"""The lines of many output files as one stream in the order of time."""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from clusterctl.logs.clean import strip_colours
from clusterctl.logs.output_files import OutputFiles
from clusterctl.logs.stream import OutputStream, line_start, tail_start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clusterctl.logs.line import LogLine, LogQuery, Skew
    from clusterctl.logs.output_files import OutputFile
    from clusterctl.logs.stream import Batch

_WIDEN = 8
_FEW = 4
"""Lines that are read of each of many streams, of which each has a few of the last ones."""


def read_lines(run_dir: str | os.PathLike[str], query: LogQuery, *, skew: Skew | None = None) -> Iterator[LogLine]:
    """Yield the lines of a run that are there now, in the order of time, the unfinished last ones included.

    Args:
        run_dir: The run directory on the head.
        query: Which lines.
        skew: How far clocks of nodes are ahead; `None` where all are in step.
    """
    streams = open_streams(OutputFiles(run_dir).discover(), query, skew)
    return history(streams, query, flush=True)


def open_streams(files: Sequence[OutputFile], query: LogQuery, skew: Skew | None) -> list[OutputStream]:
    """Return a stream for each file that can hold wanted lines, at its beginning."""
    return [
        OutputStream(file, raw=query.raw, skew=skew)
        for file in files
        if query.wants_file(file.node, file.rank, file.attempt)
    ]


def history(streams: Sequence[OutputStream], query: LogQuery, *, flush: bool) -> Iterator[LogLine]:
    """Move the streams to where the query begins, then yield up to the sizes that the files have now.

    Args:
        streams: Freshly opened.
        query: Which lines.
        flush: Yield unfinished last lines too; else they stay pending in their streams.
    """
    ends = [_end(stream, query) for stream in streams]
    starts = [_since_start(stream, query, end) for stream, end in zip(streams, ends, strict=True)]
    if query.tail is None:
        yield from _merged(streams, starts, ends, query, flush=flush)
        return
    if query.grep is None and query.tail:
        yield from _last_lines(streams, starts, ends, query, query.tail, flush=flush)
        return
    window = query.tail
    while True:
        moved = [
            max(start, tail_start(stream.file.path, end, window)) if end else 0
            for stream, start, end in zip(streams, starts, ends, strict=True)
        ]
        last = deque(_merged(streams, moved, ends, query, flush=flush), maxlen=query.tail)
        # A filter by pattern may have eaten what was read; then look further back.
        if query.grep is None or len(last) == query.tail or moved == starts:
            yield from last
            return
        window = max(window, 1) * _WIDEN


def _last_lines(
    streams: Sequence[OutputStream],
    starts: Sequence[int],
    ends: Sequence[int],
    query: LogQuery,
    tail: int,
    *,
    flush: bool,
) -> list[LogLine]:
    """Return the last lines of all streams together; of each it reads few, and more where those may not be all."""
    window = min(tail, max(_FEW, 2 * tail // max(1, len(streams))))
    read: list[list[Batch]] = [[]] * len(streams)
    begun = [0] * len(streams)
    unsure = [number for number, end in enumerate(ends) if end]
    while True:
        for number in unsure:
            stream, end = streams[number], ends[number]
            begun[number] = max(starts[number], tail_start(stream.file.path, end, window))
            stream.restart(begun[number])
            read[number] = list(_batches(stream, end, flush=flush))
        batches = sorted(chain.from_iterable(read), key=attrgetter("time"))
        wanted = (line for batch in batches if query.wants_time(batch.time) for line in batch.lines)
        last = list(deque(wanted, maxlen=tail))
        oldest = last[0].time if len(last) == tail else float("-inf")
        # What was not read of a stream is no later than the first line that was.
        unsure = [
            number
            for number in unsure
            if begun[number] > starts[number] and (not read[number] or read[number][0].time >= oldest)
        ]
        if not unsure or window >= tail:
            return last
        window = min(tail, window * _WIDEN)


def matching(lines: list[LogLine], query: LogQuery) -> list[LogLine]:
    """Return those lines that the query's pattern is found in."""
    if query.grep is None:
        return lines
    search = query.grep.search
    return [line for line in lines if search(strip_colours(line.text))]


def by_time(batch: Batch) -> float:
    """Key for sorting batches; ties keep the order of the streams."""
    return batch.time


def _merged(
    streams: Sequence[OutputStream], starts: Sequence[int], ends: Sequence[int], query: LogQuery, *, flush: bool
) -> Iterator[LogLine]:
    parts = []
    for stream, start, end in zip(streams, starts, ends, strict=True):
        stream.restart(start)
        parts.append(_batches(stream, end, flush=flush))
    for batch in heapq.merge(*parts, key=attrgetter("time")) if len(parts) > 1 else (parts[0] if parts else ()):
        if query.wants_time(batch.time):
            yield from matching(batch.lines, query)


def _batches(stream: OutputStream, end: int, *, flush: bool) -> Iterator[Batch]:
    now = _age(stream)
    yield from stream.read(end, now)
    if flush and (batch := stream.flush(now)):
        yield batch


def _age(stream: OutputStream) -> float:
    """Return the time for bytes that the index does not cover: when the replica was last written."""
    try:
        return os.stat(stream.file.path).st_mtime
    except FileNotFoundError:
        return time.time()


def _end(stream: OutputStream, query: LogQuery) -> int:
    size = stream.size()
    if query.until is None:
        return size
    until = stream.size_until(query.until)
    return size if until is None or until >= size else line_start(stream.file.path, until)


def _since_start(stream: OutputStream, query: LogQuery, end: int) -> int:
    if query.since is None or not end:
        return 0
    return line_start(stream.file.path, min(end, stream.size_before(query.since)))
