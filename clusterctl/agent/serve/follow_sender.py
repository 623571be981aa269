"""Sends events and files of the runs that a controller follows, as fast as its credit and the connection allow."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.linux.event_loop import FolderWatcher
from clusterctl.agent.node_state import journal, output_reading
from clusterctl.agent.node_state.output_reading import OffsetTable
from clusterctl.agent.protocol import command_messages, events, frames
from clusterctl.agent.protocol import run_files as protocol_files

if TYPE_CHECKING:
    from clusterctl.agent.linux.event_loop import EventLoop, FrameChannel, Timer
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol.run_requests import FollowArguments

_MAX_QUEUED_BYTES = 256 * 1024
"""The sender adds no more frames while the connection has this many unsent bytes."""
_RETRY_DELAY_S = 1.0
_SMALL_BYTES = 16 * 1024
"""If a pass sends fewer bytes of output than this, the next pass starts after the pace interval and not at once."""


class FollowSender:
    """Sends new events and output of all runs that a session follows, each time before the event loop waits."""

    def __init__(self, loop: EventLoop, channel: FrameChannel) -> None:
        self._loop, self._channel = loop, channel
        self._followers: dict[tuple[str, str], RunFollower] = {}
        self._notifier = FolderWatcher(loop, self.schedule_send)
        self._credit = 0
        self._stream = command_messages.FIRST_AGENT_STREAM
        self._is_send_scheduled = False
        self._pace_s = self._next_send_at = 0.0
        self._timer: Timer | None = None
        loop.call_before_each_wait(self._send_pending)

    def __contains__(self, key: tuple[str, str]) -> bool:
        """Return whether the controller follows a run."""
        return key in self._followers

    def follow(self, run: RunDir, follow: FollowArguments) -> None:
        """Start to send the events and output that follow the cursors; replace an earlier request for the same run."""
        key = (run.run, run.node)
        self.unfollow(key)
        send, send_data = self._channel.send, self._channel.send_data
        self._followers[key] = RunFollower(run, follow, send, send_data, self._allocate_stream, self._notifier)
        self._credit, self._pace_s = follow.credit, follow.pace
        self._send_now()

    def unfollow(self, key: tuple[str, str]) -> None:
        """Stop sending events and output of a run."""
        follower = self._followers.pop(key, None)
        if follower is not None:
            follower.close()

    def add_credit(self, count: int) -> None:
        """Allow `count` more bytes of output."""
        self._credit += count
        self.schedule_send()

    def schedule_send(self) -> None:
        """Send new events and output before the event loop waits again."""
        self._is_send_scheduled = True

    def _allocate_stream(self) -> int:
        self._stream += 1
        return self._stream

    def _has_room(self) -> bool:
        return self._channel.queued_bytes < _MAX_QUEUED_BYTES

    def _send_pending(self) -> None:
        """Send all new events, then new output as far as credit and connection allow."""
        if not self._is_send_scheduled:
            return
        # Events of a long journal stay in the file until the connection has room.
        if not all(follower.send_events(self._has_room) for follower in self._followers.values()):
            return
        if self._is_rate_limited():
            return
        before = self._credit
        while self._credit > 0 and self._has_room():
            sent = 0
            for follower in list(self._followers.values()):
                try:
                    sent += follower.send_next_data(self._credit - sent)
                except OSError:
                    # Try again later: for example, this machine has too many open files at the moment.
                    self._loop.call_later(_RETRY_DELAY_S, self.schedule_send)
                if sent >= self._credit:
                    break
            if not sent:
                self._is_send_scheduled = False
                if 0 < before - self._credit < _SMALL_BYTES:
                    self._next_send_at = time.monotonic() + self._pace_s
                return
            self._credit -= sent
        # Without credit, `add_credit` schedules the next send. If the connection is full, its progress wakes the loop.
        self._is_send_scheduled = self._credit > 0

    def _is_rate_limited(self) -> bool:
        """Return whether new output has to wait until the pace interval is over; if so, a timer sends the output."""
        remaining_s = self._next_send_at - time.monotonic()
        if remaining_s <= 0.0:
            return False
        self._is_send_scheduled = False
        if self._timer is None:
            self._timer = self._loop.call_later(remaining_s, self._send_now)
        return True

    def _send_now(self) -> None:
        """Send new output before the event loop waits again, even if the pace interval is not over."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next_send_at = None, 0.0
        self.schedule_send()


@dataclass
class _FollowedFile:
    """A file that the follower sends.

    Attributes:
        offset: Offset of the next byte to send.
        attempt: The attempt of the file; -1 for the samples.
        rank: The rank if the file is its output; `None` for other files.
        stream: The number of the stream of this file; 0 before the stream was announced.
        idle_status: Size, blocks and time of the file when its last byte was sent.
    """

    name: str
    path: str
    offset: int
    attempt: int = -1
    rank: int | None = None
    stream: int = 0
    idle_status: tuple[int, int, int] | None = None


class RunFollower:
    """Sends the events and files of one run to one controller. Files are open only while they are read.

    Attributes:
        state: The state of the run, up to the last journal line that was read.
    """

    def __init__(
        self,
        run: RunDir,
        request: FollowArguments,
        send: Callable[[dict[str, Any]], None],
        send_data: Callable[[int, int, bytes], None],
        allocate_stream: Callable[[], int],
        notifier: FolderWatcher,
    ) -> None:
        self.run = run
        self.state = journal.JournalState()
        self._request = request
        self._send, self._send_data, self._allocate_stream, self._notifier = send, send_data, allocate_stream, notifier
        self._complete_before = request.complete_before
        self._journal = journal.JournalReader(run.journal_file)
        self._files: dict[str, _FollowedFile] = {}
        self._offset_table: dict[int, OffsetTable] = {}
        self._swept_attempts: set[int] = set()
        self._next_file = 0
        notifier.watch(run.path)
        self._add_file(protocol_files.SAMPLES_FILE)

    # --- events

    def send_events(self, has_room: Callable[[], bool] = lambda: True) -> bool:
        """Send new events until all are sent or `has_room` returns false; return whether all are sent."""
        for line in self._journal.read_lines():
            self._send_event_line(line)
            if not has_room():
                return False
        return True

    def _send_event_line(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            entry = events.decode_event_record(record)
        except ValueError:
            return
        if entry is not None:
            journal.apply_event(self.state, *entry)
            self._apply_event(entry[1])
        if record["seq"] > self._request.seq:
            self._send({"push": "event", "run": self.run.run, "node": self.run.node, "event": record})

    def _apply_event(self, event: events.Event) -> None:
        if getattr(event, "attempt", self._request.complete_before) < self._request.complete_before:
            return
        if isinstance(event, events.Prepared):
            self._notifier.watch(self.run.attempt_dir(event.attempt))
            self._offset_table[event.attempt] = OffsetTable(self.run.attempt_dir(event.attempt))
        elif isinstance(event, events.Started):
            self._add_file(protocol_files.format_output_path(event.attempt, event.rank), event.attempt, event.rank)
            self._add_file(protocol_files.format_index_path(event.attempt, event.rank), event.attempt)
        elif isinstance(event, events.Swept) and not event.remaining:
            self._swept_attempts.add(event.attempt)

    # --- bytes

    def _add_file(self, name: str, attempt: int = -1, rank: int | None = None) -> None:
        if name not in self._files:
            offset = max(0, int(self._request.cursors.get(name, 0)))
            self._files[name] = _FollowedFile(name, self.run.file_path(name), offset, attempt, rank)

    def send_next_data(self, max_bytes: int) -> int:
        """Send new bytes of the next file that has new bytes; return the number of sent bytes, or 0 if no file has any.

        Raises:
            OSError: A file cannot be read, and no other file has new bytes.
        """
        files, swept, failed = list(self._files.values()), set(self._swept_attempts), None
        for step in range(len(files)):
            file = files[(self._next_file + step) % len(files)]
            try:
                sent = self._send_piece(file, min(max_bytes, frames.CHUNK_BYTES))
            except OSError as error:
                failed = error
                continue
            if sent:
                self._next_file += step + 1
                return sent
        if failed is not None:
            raise failed
        self._forget_attempts(swept)
        return 0

    def _send_piece(self, file: _FollowedFile, limit: int) -> int:
        try:
            status = os.stat(file.path)
            status_now = (status.st_size, status.st_blocks, status.st_mtime_ns)
            if status_now == file.idle_status:
                return 0
            piece = self._read_piece(file, limit)
        except FileNotFoundError:
            return 0
        if piece is None:
            return 0
        file.offset = piece.offset
        if not piece.data:
            file.idle_status = status_now
            return 0
        if not file.stream:
            file.stream = self._allocate_stream()
            run_keys = {"run": self.run.run, "node": self.run.node, "file": file.name}
            self._send({"push": "stream", "stream": file.stream, **run_keys})
        self._send_data(file.stream, piece.offset, piece.data)
        file.offset += len(piece.data)
        return len(piece.data)

    def _read_piece(self, file: _FollowedFile, limit: int) -> output_reading.OutputPiece | None:
        if file.rank is None:
            return output_reading.read_growing_file(file.path, file.name, file.offset, limit)
        offset_table = self._offset_table[file.attempt]
        piece = output_reading.read_output(file.path, offset_table, file.rank, file.offset, limit, sending=True)
        if file.attempt != self.state.attempt:
            offset_table.close()
        return piece

    def _forget_attempts(self, attempts: set[int]) -> None:
        """Tell the controller that ended attempts are complete once all their files are sent; then forget them."""
        self._files = {name: file for name, file in self._files.items() if file.attempt not in attempts}
        for attempt in attempts:
            self._offset_table.pop(attempt).close()
            self._notifier.unwatch(self.run.attempt_dir(attempt))
        self._swept_attempts -= attempts
        complete_before = min(self._offset_table, default=self.state.attempt + 1)
        if complete_before > self._complete_before:
            self._complete_before = complete_before
            self._send({"push": "complete", "run": self.run.run, "node": self.run.node, "before": complete_before})

    def close(self) -> None:
        """Stop following and close all files."""
        for offset_table in self._offset_table.values():
            offset_table.close()
        self._offset_table.clear()
        self._files.clear()
