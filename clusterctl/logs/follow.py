"""Follows the output of a run: yields the existing lines, then returns the new lines at each poll."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from clusterctl.logs.log_line import LogLine, LogQuery, Skew
from clusterctl.logs.merge import read_history
from clusterctl.logs.output_stream import LineBatch, OutputStream, open_streams
from clusterctl.logs.replica_finder import OutputFileFinder

_POLL_BYTES = 1024 * 1024
"""Maximum number of bytes that one poll reads. It is small, because the caller handles signals and keys between
polls."""


@dataclass(slots=True)
class _Frame:
    """The last shown frame of a progress bar, and the time at which it was shown."""

    shown: str = ""
    at: float = float("-inf")


class LogFollower:
    """Follows all output files of a run, also files of ranks that start later and of new attempts.

    First read all of `history()`, or skip it to get only new lines. Then call `poll()` regularly; it never waits.

    Args:
        run_dir: The run directory on the head. This directory may contain no output yet.
        query: Selects the lines; `tail` applies to the history only.
        frame_interval: Minimum seconds between two frames of a progress bar; `None` shows only complete lines.
        skew: Clock offset of each node, called whenever there are lines; `None` if there are no offsets.
        clock: Wall clock in seconds.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        query: LogQuery,
        *,
        frame_interval: float | None = 1.0,
        skew: Skew | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.more = False
        """Whether the last poll left data unread because of the maximum size. If so, the caller should poll again
        immediately."""
        self._files = OutputFileFinder(run_dir)
        self._query = query
        self._skew = skew
        self._clock = clock
        self._frame_interval = None if query.raw else frame_interval
        self._streams: list[OutputStream] = []
        self._frames: dict[OutputStream, _Frame] = {}
        self._newest: dict[int, int] = {}
        self._turn = 0

    def history(self) -> Iterator[LogLine]:
        """Yield the existing lines."""
        self._discover()
        return read_history(self._streams, self._query, flush=False)

    def poll(self) -> list[LogLine]:
        """Return the new lines in the order of time, at most 1 MiB of them (see `more`)."""
        now = self._clock()
        return self._new_lines(now) + self._new_frames(now)

    def finish(self) -> Iterator[list[LogLine]]:
        """Yield all unread lines in portions, also unfinished last lines. Call this method when the run is over."""
        now = self._clock()
        self.more = True
        while self.more:
            yield self._new_lines(now)
        batches = sorted((b for s in self._streams if (b := s.flush(now))), key=attrgetter("time"))
        yield [line for b in batches for line in self._query.filter_lines(b.lines)]

    # --- private

    def _new_lines(self, now: float) -> list[LogLine]:
        self._discover()
        batches: list[LineBatch] = []
        budget = _POLL_BYTES
        self.more = False
        # Start with a different stream at each poll, so that a stream with much output cannot block the others.
        self._turn = (self._turn + 1) % max(1, len(self._streams))
        for stream in self._streams[self._turn :] + self._streams[: self._turn]:
            if stream.closed:
                continue
            size = stream.size()
            end = min(size, stream.offset + max(budget, 0))
            budget -= max(0, end - stream.offset)
            self.more |= end < size
            batches += stream.read(end, now)
        batches += self._close_old(now)
        batches.sort(key=attrgetter("time"))
        return [line for b in batches if self._query.wants_time(b.time) for line in self._query.filter_lines(b.lines)]

    def _discover(self) -> None:
        for stream in open_streams(self._files.find_new_files(), self._query, self._skew):
            self._streams.append(stream)
            rank = stream.file.rank
            self._newest[rank] = max(self._newest.get(rank, 0), stream.file.attempt)
        self._streams.sort(key=lambda stream: stream.file)

    def _close_old(self, now: float) -> Iterator[LineBatch]:
        """Yield the last lines of old attempts, if the rank has started a new attempt: the old files do not grow."""
        for stream in self._streams:
            done = stream.file.attempt < self._newest[stream.file.rank] and stream.offset >= stream.size()
            if done and not stream.closed:
                stream.closed = True
                if batch := stream.flush(now):
                    yield batch

    def _new_frames(self, now: float) -> list[LogLine]:
        if self._frame_interval is None:
            return []
        lines = []
        for stream in self._streams:
            bar = stream.has_progress_bar and not stream.closed and stream.offset >= stream.size()
            text = stream.render_unfinished_line() if bar else None
            frame = self._frames.get(stream)
            if text is None or frame is None:
                self._frames[stream] = frame = _Frame()
            if text is None or text == frame.shown:
                continue
            if now - frame.at >= self._frame_interval:
                frame.shown, frame.at = text, now
                lines.append(stream.build_line(now, text, partial=True))
        return self._query.filter_lines(lines)
