"""Writes a run directory on the head. A run directory has one writer at a time and any number of readers.

RUN/spec.json            the resolved cluster file (no secrets)
RUN/plan-A.json          the launch plan of attempt A (no secrets)
RUN/events.jsonl         the controller's own journal
RUN/lock                 held (flock) while a controller is alive, with its machine and pid
RUN/control              the name of the controller's socket
RUN/epoch                the highest epoch that a controller of this head has used
RUN/summary.json         what lists show of a run that has ended
RUN/manifest.json        the synced files; their content is in content/SHA256 beside the folder of all runs
RUN/nodes/NODE/          replicas, under the node's own names; their size is the cursor
RUN/stall-N/             evidence of a stall
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterctl.agent.protocol import frames, run_files
from clusterctl.errors import RefusedError
from clusterctl.run.record import lock_files, state_reader
from clusterctl.run.record.disk_files import (
    LineFile,
    free_file_start,
    ignore_resource_shortage,
    is_resource_shortage,
    write_atomically,
)
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import find_slowest_rank_step
from clusterctl.run.record.state_reader import LineTail, load_state
from clusterctl.run.record.thread_ownership import ThreadOwned
from clusterctl.run.rules import controller_events as head
from clusterctl.validation.journal_lines import MAX_LINE_BYTES
from clusterctl.validation.session_quota import MAX_JOURNAL_BYTES

_DURABLE = (head.AttemptStarted, head.AttemptEndDecided, head.RestartPlanned, head.RunEnded)
_EVENTS_RESERVE = 1024 * 1024
_JOURNAL_RESERVE = 128 * 1024
MAX_SAMPLES_BYTES = 16 * 1024 * 1024
"""The most bytes of a node's samples that the head keeps: many times what any reader needs."""


# --- writing


class RunDirWriter(ThreadOwned):
    """The writer of a run directory. The writer holds the lock of the run from construction to `close`.

    Raises:
        RefusedError: Another controller is alive, or the file system has no locks.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        try:
            self._lock = lock_files.take_lock(run.lock)
        except lock_files.LockedError as error:
            raise RefusedError(
                f"{run.run} has a controller already", hint=f"`clusterctl attach {run.run}` shows it"
            ) from error
        self._seq = _read_last_seq(run.events)
        self._events = LineFile(run.events, _EVENTS_RESERVE)
        self._journals: dict[str, LineFile] = {}
        self._waiting: dict[str, LineFile] = {}
        self._files = ReplicaFiles(run)

    def append(self, event: head.ControllerEvent, now: float) -> None:
        """Write an event of the controller; `now` is the head's clock in seconds.

        If the disk is full, the event waits until a later `flush`. Events with decisions about the run are synced to
        the disk, so that they survive a power failure of the head.
        """
        self.check_owner()
        self._seq += 1
        self._events.append((head.encode(self._seq, now, event) + "\n").encode())
        if isinstance(event, _DURABLE):
            self._events.sync()

    def append_node_event(self, node: str, record: dict[str, Any]) -> None:
        """Append one line to the replica of a node's journal.

        Raises:
            FrameError: The line or the journal would exceed its maximum.
        """
        self.check_owner()
        if node not in self._journals:
            self._journals[node] = LineFile(self.run.node(node) / run_files.JOURNAL_FILE, _JOURNAL_RESERVE)
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        if len(line) > MAX_LINE_BYTES or self._journals[node].size + len(line) > MAX_JOURNAL_BYTES:
            raise frames.FrameError(
                f"an event of {len(line)} bytes, which exceeds the limit of a line or of its journal"
            )
        if not self._journals[node].append(line):
            self._waiting[node] = self._journals[node]

    def flush(self) -> bool:
        """Write the waiting lines; return whether no line waits any more."""
        # Write the lines of nodes first: readers must see them before the controller's decisions about them.
        self._waiting = {node: file for node, file in self._waiting.items() if not file.flush()}
        return self._events.flush() and not self._waiting

    def replicate(self, node: str, file: str, offset: int, payload: bytes) -> int:
        """Write bytes of a node's file at their offset; return the new size of the replica, which is the cursor.

        Only the last `MAX_SAMPLES_BYTES` bytes of samples are kept.

        Raises:
            OSError: The disk is full (`is_resource_shortage`). The same bytes may be written again later.
        """
        self.check_owner()
        fd = self._files.open_replica(node, file)
        view, before = memoryview(payload), offset
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
        if file == run_files.SAMPLES_FILE:
            freed_bytes = run_files.find_first_kept_byte(offset, MAX_SAMPLES_BYTES)
            if freed_bytes != run_files.find_first_kept_byte(before, MAX_SAMPLES_BYTES):
                free_file_start(fd, freed_bytes)
        return offset

    def list_cursors(self, node: str, first_attempt: int = 0) -> dict[str, int]:
        """Return the size of each replica of a node, without the journal and attempts before `first_attempt`."""
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

    def close_earlier_attempts(self, node: str, attempt: int) -> None:
        """Close the files of all attempts of a node before this attempt."""
        self.check_owner()
        self._files.close_files(lambda owner, file: owner == node and -1 < run_files.parse_attempt(file) < attempt)

    def restart_replica(self, node: str, file: str) -> None:
        """Empty a replica that differs from the node's file, so that the node sends it again."""
        self.check_owner()
        os.ftruncate(self._files.open_replica(node, file), 0)

    def raise_epoch(self, known: int) -> int:
        """Save and return an epoch above all earlier epochs; `known` is the highest epoch that a node knows."""
        self.check_owner()
        try:
            stored = int(self.run.epoch.read_text())
        except (FileNotFoundError, ValueError):
            stored = 0
        epoch = max(stored, known) + 1
        # The nodes store the epoch, too. So the run can continue even if the disk of the head is full.
        with ignore_resource_shortage():
            write_atomically(self.run.epoch, str(epoch).encode())
        return epoch

    def close(self) -> None:
        """Release the lock and close all files. If the run has ended, write its summary."""
        for file in (*self._journals.values(), self._events):
            file.close()
        with contextlib.suppress(OSError):
            state = load_state(self.run)
            if state.is_over:
                content = state_reader.encode_summary(state, find_slowest_rank_step(self.run, state), self.run.events)
                write_atomically(self.run.summary, content)
        self._files.close()
        os.close(self._lock)


class ReplicaFiles:
    """Keeps replicas open. If too many are open, closes the least recently used file.

    Args:
        run: The run directory.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        # Sockets and journals need the other half of the descriptors.
        self._limit = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._open: OrderedDict[tuple[str, str], int] = OrderedDict()

    def open_replica(self, node: str, file: str) -> int:
        """Return a descriptor of a replica, valid until the next call. A missing replica is created.

        Raises:
            RefusedError: The name leads out of the run directory.
            OSError: The replica cannot be opened.
        """
        key = node, file
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        if ".." in file.split("/") or file.startswith("/"):
            raise RefusedError(f"{node} names a file outside its run directory: {file!r}")
        path = self._run.node(node) / file
        self._close_oldest(self._limit - 1)
        try:
            fd = _open_file(path)
        except OSError as error:
            if not is_resource_shortage(error) or not self._open:
                raise
            self._close_oldest(len(self._open) // 2)
            fd = _open_file(path)
        self._open[key] = fd
        return fd

    def close_files(self, matches: Callable[[str, str], bool]) -> None:
        """Close the files whose node and name match."""
        for key in [key for key in self._open if matches(*key)]:
            os.close(self._open.pop(key))

    def close(self) -> None:
        """Close all files."""
        self._close_oldest(0)

    def _close_oldest(self, count: int) -> None:
        while len(self._open) > count:
            os.close(self._open.popitem(last=False)[1])


def _open_file(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _read_last_seq(path: Path) -> int:
    last = 0
    for line in LineTail(path).read_new_lines():
        with contextlib.suppress(frames.FrameError):
            decoded = head.decode(line)
            last = decoded[0] if decoded else last
    return last
