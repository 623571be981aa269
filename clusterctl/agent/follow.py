"""Following a run: every event of its journal, and every byte of its files, from the cursors on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent import fold, journal, protocol

if TYPE_CHECKING:
    from clusterctl.agent.rundir import RunDir


@dataclass
class _File:
    name: str
    path: str
    stream: int
    offset: int
    first_valid: int = 0
    fd: int = -1
    announced: bool = False


class Follower:
    """Sends one run to one controller. It holds nothing but positions in files.

    Attributes:
        state: The run as far as its journal was read.
    """

    def __init__(
        self,
        run: RunDir,
        request: protocol.Follow,
        send: Callable[[dict[str, Any]], None],
        send_data: Callable[[int, int, bytes], None],
        new_stream: Callable[[], int],
        watch: Callable[[str], None],
    ) -> None:
        self.run = run
        self.state = fold.NodeState()
        self._request = request
        self._send, self._send_data, self._new_stream, self._watch = send, send_data, new_stream, watch
        self._journal = journal.Reader(run.journal)
        self._files: dict[str, _File] = {}
        self._turn = 0
        watch(run.path)
        self._add(protocol.SAMPLES_FILE)

    # --- events

    def pump_events(self) -> None:
        """Send the events that are new."""
        for line in self._journal.lines():
            self._line(line)

    def _line(self, line: bytes) -> None:
        try:
            entry = protocol.decode_event(line)
            record = json.loads(line)
        except ValueError:
            return
        if entry is not None:
            fold.apply(self.state, *entry)
            self._notice(entry[1])
        if record["seq"] > self._request.seq:
            self._send({"push": "event", "run": self.run.run, "node": self.run.node, "event": record})

    def _notice(self, event: protocol.Event) -> None:
        if isinstance(event, protocol.Prepared):
            self._watch(self.run.attempt(event.attempt))
        elif isinstance(event, protocol.Started):
            self._add(protocol.output_file(event.attempt, event.rank))
            self._add(protocol.index_file(event.attempt, event.rank))
        elif isinstance(event, protocol.Dropped):
            file = self._files.get(protocol.output_file(event.attempt, event.rank))
            if file is not None:
                file.first_valid = max(file.first_valid, event.first_valid)

    # --- bytes

    def _add(self, name: str) -> None:
        if name not in self._files:
            offset = max(0, int(self._request.cursors.get(name, 0)))
            self._files[name] = _File(name, self.run.file(name), 0, offset)

    def pump_data(self, budget: int) -> int:
        """Send the next bytes of one file, in turn; return how many (at most `budget`), 0 if there are none."""
        files = list(self._files.values())
        for step in range(len(files)):
            file = files[(self._turn + step) % len(files)]
            sent = self._pump(file, min(budget, protocol.CHUNK_BYTES))
            if sent:
                self._turn += step + 1
                return sent
        return 0

    def _pump(self, file: _File, limit: int) -> int:
        if file.fd < 0:
            try:
                file.fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return 0
        file.offset = max(file.offset, file.first_valid)
        data = os.pread(file.fd, limit, file.offset)
        if not data:
            return 0
        # What is given up is said before it is done: after another look these bytes are known good.
        self.pump_events()
        if file.name == protocol.SAMPLES_FILE:
            file.first_valid = protocol.first_kept(os.fstat(file.fd).st_size, protocol.SAMPLES_KEPT)
        if file.first_valid > file.offset:
            return self._pump(file, limit)
        self._announce(file)
        self._send_data(file.stream, file.offset, data)
        file.offset += len(data)
        return len(data)

    def _announce(self, file: _File) -> None:
        if not file.announced:
            file.announced = True
            file.stream = self._new_stream()
            where = {"run": self.run.run, "node": self.run.node, "file": file.name}
            self._send({"push": "stream", "stream": file.stream, **where})

    def close(self) -> None:
        """Stop following."""
        for file in self._files.values():
            if file.fd >= 0:
                os.close(file.fd)
        self._files.clear()
