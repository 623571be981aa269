"""The run directory on the head: the whole interface for reading. One writer at a time, any number of readers.

RUN/spec.json            what the run was started with (no secrets)
RUN/plan-A.json          the launch plan of attempt A (no secrets)
RUN/events.jsonl         the controller's own journal
RUN/lock                 held (flock) while a controller is alive; says on which machine, and its pid
RUN/control              by which name that controller is asked
RUN/epoch                the highest epoch that a controller of this head has used
RUN/summary.json         of a run that has ended: what lists show of it
RUN/manifest.json        what was synced; the content is in content/SHA256 beside the folder of all runs
RUN/nodes/NODE/          replicas, under the node's own names; their size is the cursor
RUN/stall-N/             evidence of a stall
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from clusterctl.agent.protocol import frames, run_files
from clusterctl.errors import RefusedError
from clusterctl.run.record import ownership as locking
from clusterctl.run.record import state_reader
from clusterctl.run.record.disk_files import LineFile, ReplicaFiles, free_head, ignore_shortage, write_atomically
from clusterctl.run.record.ownership import ThreadOwned
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import find_latest_step
from clusterctl.run.record.state_reader import LineTail, load_state
from clusterctl.run.rules import controller_events as head
from clusterctl.validation.journal import MAX_LINE_BYTES
from clusterctl.validation.quota import MAX_JOURNAL_BYTES

_DURABLE = (head.Attempt, head.EndDecided, head.Restarting, head.Ended)
_EVENTS_RESERVE = 1024 * 1024
_JOURNAL_RESERVE = 128 * 1024
MAX_SAMPLES_BYTES = 16 * 1024 * 1024
"""Bytes of a node's samples that are kept here at most: many times what any reader looks back."""


# --- writing


class Writer(ThreadOwned):
    """The one writer of a run directory. Holds the lock from construction to `close`.

    Raises:
        RefusedError: Another controller is alive, or the file system has no locks.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        try:
            self._lock = locking.take_lock(run.lock)
        except locking.LockedError as error:
            raise RefusedError(
                f"{run.run} has a controller already", hint=f"`clusterctl attach {run.run}` shows it"
            ) from error
        self._seq = _read_last_seq(run.events)
        self._events = LineFile(run.events, _EVENTS_RESERVE)
        self._journals: dict[str, LineFile] = {}
        self._waiting: dict[str, LineFile] = {}
        self._files = ReplicaFiles(self._find_replica_path)

    def append(self, event: head.ControllerEvent, now: float) -> None:
        """Write an event of the controller's own; `now` is the head's clock in seconds.

        Where there is no room it waits, as do the lines of `journal`: see `flush`. What decides over the run is on the
        disk when this returns, so that a head that loses its power does not come back with another view of it.
        """
        self.check()
        self._seq += 1
        self._events.append((head.encode(self._seq, now, event) + "\n").encode())
        if isinstance(event, _DURABLE):
            self._events.sync()

    def journal(self, node: str, record: dict[str, Any]) -> None:
        """Append one line to the replica of a node's journal.

        Raises:
            FrameError: It would be longer than a line, or a journal, may be.
        """
        self.check()
        if node not in self._journals:
            self._journals[node] = LineFile(self.run.node(node) / run_files.JOURNAL_FILE, _JOURNAL_RESERVE)
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        if len(line) > MAX_LINE_BYTES or self._journals[node].size + len(line) > MAX_JOURNAL_BYTES:
            raise frames.FrameError(f"an event of {len(line)} bytes, for which its journal has no room")
        if not self._journals[node].append(line):
            self._waiting[node] = self._journals[node]

    def flush(self) -> bool:
        """Write the lines that found no room before; return whether none waits any more."""
        # Nodes first: what the controller concluded from their lines must not be seen before them.
        self._waiting = {node: file for node, file in self._waiting.items() if not file.flush()}
        return self._events.flush() and not self._waiting

    def replicate(self, node: str, file: str, offset: int, payload: bytes) -> int:
        """Write bytes of a node's file at their own offset; return the replica's new size, which is the cursor.

        Of samples, which would be most of what a long run leaves here, only the last `SAMPLES_KEPT` bytes are kept.

        Raises:
            OSError: There is no room (`linefile.is_short`); writing the same again later makes it whole.
        """
        self.check()
        fd = self._files.open_replica(node, file)
        view, before = memoryview(payload), offset
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
        if file == run_files.SAMPLES_FILE:
            freed_bytes = run_files.find_first_kept_byte(offset, MAX_SAMPLES_BYTES)
            if freed_bytes != run_files.find_first_kept_byte(before, MAX_SAMPLES_BYTES):
                free_head(fd, freed_bytes)
        return offset

    def list_cursors(self, node: str, first_attempt: int = 0) -> dict[str, int]:
        """Return the size of every replica of a node, by the file's own name.

        Left out are the journal, and attempts before number `whole`.
        """
        base = self.run.node(node)
        tops = (
            [p for p in base.iterdir() if not -1 < run_files.parse_attempt(p.name) < first_attempt]
            if base.is_dir()
            else []
        )
        paths = [path for top in tops for path in (top, *top.rglob("*"))]
        sizes = {p.relative_to(base).as_posix(): p.stat().st_size for p in paths if p.is_file()}
        sizes.pop(run_files.JOURNAL_FILE, None)
        return sizes

    def close_old_attempts(self, node: str, attempt: int) -> None:
        """Keep no file of a node open that is of an attempt before that one."""
        self.check()
        self._files.close_matching(lambda owner, file: owner == node and -1 < run_files.parse_attempt(file) < attempt)

    def restart_replica(self, node: str, file: str) -> None:
        """Throw away a replica that turned out to differ from the node's file, so that it is sent again."""
        self.check()
        os.ftruncate(self._files.open_replica(node, file), 0)

    def next_epoch(self, seen: int) -> int:
        """Return an epoch above every one used so far, and remember it; `seen` is the highest that a node knows."""
        self.check()
        try:
            stored = int(self.run.epoch.read_text())
        except (FileNotFoundError, ValueError):
            stored = 0
        epoch = max(stored, seen) + 1
        # The nodes remember it too: that is enough to go on with a run whose head has no space.
        with ignore_shortage():
            write_atomically(self.run.epoch, str(epoch).encode())
        return epoch

    def close(self) -> None:
        """Let go of the lock and of every file; a run that has ended gets its summane."""
        for file in (*self._journals.values(), self._events):
            file.close()
        self._write_summary()
        self._files.close()
        os.close(self._lock)

    def _write_summary(self) -> None:
        with contextlib.suppress(OSError):
            state = load_state(self.run)
            if state.over:
                content = state_reader.encode_summary(state, find_latest_step(self.run, state), self.run.events)
                write_atomically(self.run.summary, content)

    def _find_replica_path(self, node: str, file: str) -> Path:
        if ".." in file.split("/") or file.startswith("/"):
            raise RefusedError(f"{node} names a file outside its run directory: {file!r}")
        return self.run.node(node) / file


def _read_last_seq(path: Path) -> int:
    last = 0
    for line in LineTail(path).read():
        with contextlib.suppress(frames.FrameError):
            decoded = head.decode(line)
            last = decoded[0] if decoded else last
    return last
