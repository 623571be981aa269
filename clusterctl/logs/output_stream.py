"""Reads one output file as lines with times, and finds offsets of lines in a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from clusterctl.logs.log_line import LogLine, LogQuery, Skew
from clusterctl.logs.replica_finder import OutputFile
from clusterctl.logs.safe_text import LINE_LIMIT, clean_block, clean_text
from clusterctl.logs.time_index import TimeIndex

BLOCK = 256 * 1024
_FRAME_LIMIT = LINE_LIMIT // 4
_MAX_SEARCH_BYTES = 32 * BLOCK
"""Limit of the backward search for a line start: a progress bar may write gigabytes without a line end."""


class LineBatch(NamedTuple):
    """Lines of one file with the same time."""

    time: float
    lines: list[LogLine]


class OutputStream:
    """Reads one output file from `offset` to its current end, and continues there on the next call.

    Args:
        file: The output file.
        offset: The offset at which reading starts; it must be the start of a line.
        raw: Return lines with all their bytes (see `LogQuery.raw`).
        skew: Clock offset of each node, which is subtracted from every time.
    """

    def __init__(self, file: OutputFile, *, offset: int = 0, raw: bool = False, skew: Skew | None = None) -> None:
        self.file = file
        self.closed = False
        """Whether the file does not grow any more. Readers may skip such a file."""
        self._index = TimeIndex(file.index_path)
        self._raw = raw
        self._skew_of = skew
        self.restart(offset)
        self._make: Callable[[bytes], list[str]] = _raw_lines if raw else clean_block

    @property
    def _skew(self) -> float:
        return 0.0 if self._skew_of is None else self._skew_of(self.file.node)

    def restart(self, offset: int) -> None:
        """Continue at byte `offset`, which must be the start of a line; forget the unfinished line."""
        self.offset = offset
        self._mark = self._index.find_position_of_size(offset + 1)
        self._pending = b""
        self._cut = 0
        self._time = float("-inf")

    def find_size_before(self, time: float) -> int:
        """Return a size of the file: every line that ends beyond this size was written at `time` or later."""
        return self._index.find_size_before(time + self._skew)

    def find_size_until(self, time: float) -> int | None:
        """Return the size of all lines written until `time`; `None` if the index has no later record."""
        return self._index.find_size_until(time + self._skew)

    def size(self) -> int:
        """Return the current size of the file; 0 if the file does not exist."""
        try:
            return os.stat(self.file.path).st_size
        except FileNotFoundError:
            return 0

    def read(self, end: int, now: float) -> Iterator[LineBatch]:
        """Yield the new complete lines up to byte `end`.

        Args:
            end: The offset at which reading stops. An unfinished line stays for the next call.
            now: Time in seconds for bytes that the index does not cover yet.
        """
        if self.offset >= end:
            return
        try:
            handle = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            while self.offset < end:
                yield from self._gap(handle, end, now)
                stop = min(end, self.offset + BLOCK, _seek_hole(handle, self.offset))
                data = os.pread(handle, stop - self.offset, self.offset)
                if not data:
                    return
                yield from self._take(data, now)
        finally:
            os.close(handle)

    def render_unfinished_line(self) -> str | None:
        """Return the present text of the unfinished last line, or `None` if it is empty."""
        return clean_text(self._pending.decode("utf-8", "replace")) or None if self._pending else None

    @property
    def has_progress_bar(self) -> bool:
        """Whether carriage returns rewrite the unfinished last line."""
        return b"\r" in self._pending

    def flush(self, now: float) -> LineBatch | None:
        """Return the unfinished last line as a line of its own, or `None`."""
        pending, self._pending = self._pending, b""
        if not pending and not self._cut:
            return None
        time = self._time_of(self.offset, now)
        texts = self._texts(pending, whole=False)
        return LineBatch(time, [self.build_line(time, text, partial=True) for text in texts])

    # --- private

    def _gap(self, handle: int, end: int, now: float) -> Iterator[LineBatch]:
        """Skip a hole in the file: bytes that the node dropped before replication, or that the head removed."""
        data = min(_seek_data(handle, self.offset), end)
        if data > self.offset:
            kept = self._pending.rstrip(b"\0")
            zeros, self._pending = len(self._pending) - len(kept), kept
            if batch := self.flush(now):
                yield batch
            # Holes consist of whole pages. In the pages before and after a hole, missing bytes are zeros.
            first = os.pread(handle, min(BLOCK, end - data), data)
            data += len(first) - len(first.lstrip(b"\0"))
            missing, self.offset = zeros + data - self.offset, data
            time = self._time_of(data, now)
            if not self._raw:
                yield LineBatch(time, [self.build_line(time, f"[{missing:,} bytes of output are gone here]")])

    def _take(self, data: bytes, now: float) -> Iterator[LineBatch]:
        """Split unfinished bytes and `data` into lines, one batch per index record."""
        self.offset += len(data)
        body_end = data.rfind(b"\n") + 1
        if not body_end:
            if batch := self._hold(data, now):
                yield batch
            return
        block, self._pending = self._pending + data[:body_end], b""
        rest = data[body_end:]
        start = self.offset - len(rest) - len(block)
        yield from self._cut_by_time(block, start, now)
        if batch := self._hold(rest, now):
            yield batch

    def _cut_by_time(self, block: bytes, start: int, now: float) -> Iterator[LineBatch]:
        position, length, skew = 0, len(block), self._skew
        while position < length:
            mark = self._index.get(self._mark)
            if mark is not None and mark.size < start + length:
                cut = block.rfind(b"\n", position, max(position, mark.size - start)) + 1
                self._mark += 1
                if cut > position:
                    yield self._batch(block[position:cut], self._forward(mark.time - skew))
                    position = cut
                continue
            time = now if mark is None else mark.time - skew
            yield self._batch(block[position:] if position else block, self._forward(time))
            position = length

    def _batch(self, block: bytes, time: float) -> LineBatch:
        node, rank, attempt = self.file.node, self.file.rank, self.file.attempt
        return LineBatch(time, [LogLine(time, node, rank, attempt, text) for text in self._texts(block, whole=True)])

    def _texts(self, block: bytes, *, whole: bool) -> list[str]:
        cut, self._cut = self._cut, 0
        if not cut:
            return self._make(block)
        head, _, rest = block.partition(b"\n")
        kept = clean_text(head[:LINE_LIMIT].decode("utf-8", "replace"))
        texts = [f"{kept} … [{cut + len(head):,} bytes in this line]"]
        return texts + self._make(rest) if whole and rest else texts

    def _hold(self, data: bytes, now: float) -> LineBatch | None:
        """Add data to the unfinished line; bytes beyond `LINE_LIMIT` are counted and dropped."""
        self._pending += data
        if len(self._pending) <= LINE_LIMIT:
            return None
        if self._raw:
            time = self._time_of(self.offset, now)
            piece, self._pending = self._pending, b""
            return LineBatch(time, [self.build_line(time, _raw_text(piece), partial=True)])
        if b"\r" in data:
            self._cut = 0
            self._pending = _last_frames(self._pending)
        else:
            self._cut += len(self._pending) - LINE_LIMIT
            self._pending = self._pending[:LINE_LIMIT]
        return None

    def _time_of(self, offset: int, now: float) -> float:
        mark = self._index.get(self._mark)
        while mark is not None and mark.size < offset:
            self._mark += 1
            mark = self._index.get(self._mark)
        return self._forward(now if mark is None else mark.time - self._skew)

    def _forward(self, time: float) -> float:
        """Return `time`, or the time of the last line if that is later: times within a file never decrease."""
        self._time = max(self._time, time)
        return self._time

    def build_line(self, time: float, text: str, *, partial: bool = False) -> LogLine:
        """Return a line of this worker."""
        return LogLine(time, self.file.node, self.file.rank, self.file.attempt, text, partial)


def open_streams(files: Sequence[OutputFile], query: LogQuery, skew: Skew | None) -> list[OutputStream]:
    """Return a stream, at offset 0, for each file that may contain selected lines."""
    return [
        OutputStream(file, raw=query.raw, skew=skew)
        for file in files
        if query.wants_file(file.node, file.rank, file.attempt)
    ]


def _raw_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _raw_lines(block: bytes) -> list[str]:
    lines = _raw_text(block).split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _last_frames(pending: bytes) -> bytes:
    """Return the end of a progress bar: the last complete frame and the unfinished frame."""
    *frames, current = pending.split(b"\r")
    previous = next((frame for frame in reversed(frames) if frame.strip()), b"")
    return b"\r".join((b"", previous[:_FRAME_LIMIT], current[:_FRAME_LIMIT]))


def _seek_data(handle: int, offset: int) -> int:
    """Return the offset of the first data at or after `offset`; the end of the file if only holes follow."""
    try:
        return os.lseek(handle, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return max(offset, os.fstat(handle).st_size)
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # This file system does not support holes.
            return offset
        raise


def _seek_hole(handle: int, offset: int) -> int:
    """Return the offset of the next hole after `offset`, or the end of the file."""
    try:
        return os.lseek(handle, offset, os.SEEK_HOLE)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENXIO):
            return os.fstat(handle).st_size
        raise


# --- offsets in a file


def find_line_start(path: str, offset: int) -> int:
    """Return the start of the line that contains byte `offset`."""
    return _lines_before(path, offset, 1) if offset > 0 else 0


def find_tail_start(path: str, end: int, lines: int) -> int:
    """Return the offset at which the last `lines` lines before byte `end` begin.

    The function reads backwards, only as far as necessary.
    The last line before `end` counts with or without its line end.
    """
    if lines <= 0 or end <= 0:
        return end
    with open(path, "rb", buffering=0) as file:
        ended = os.pread(file.fileno(), 1, end - 1) == b"\n"
    return _lines_before(path, end, lines + 1 if ended else lines)


def _lines_before(path: str, end: int, ends: int) -> int:
    """Return the offset after the `ends`-th last line end before `end`; 0 or the end of a hole if there are fewer."""
    position, searched = end, 0
    with open(path, "rb", buffering=0) as file:
        while position > 0:
            size = min(BLOCK, position)
            position -= size
            block = os.pread(file.fileno(), size, position)
            count = block.count(b"\n")
            if count >= ends:
                cut = len(block)
                for _ in range(ends):
                    cut = block.rfind(b"\n", 0, cut)
                return position + cut + 1
            ends -= count
            searched = 0 if count else searched + size
            if searched >= _MAX_SEARCH_BYTES or not block.strip(b"\0"):
                return position
    return 0
