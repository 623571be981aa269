"""Sends the events and files of one run to a controller, from the controller's cursors on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.node_state import journal, output_reading
from clusterctl.agent.node_state.output_reading import OffsetTable
from clusterctl.agent.protocol import events, frames, run_requests
from clusterctl.agent.protocol import run_files as protocol_files

if TYPE_CHECKING:
    from clusterctl.agent.linux.event_loop import FolderWatcher
    from clusterctl.agent.node_state.run_dir import RunDir


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
        request: run_requests.FollowArguments,
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
