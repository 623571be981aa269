"""Writes bytes of the nodes' files into replicas, and sends acknowledgements to the nodes."""

from __future__ import annotations

import base64
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from clusterctl.agent.protocol import command_payload_types, run_files
from clusterctl.agent.protocol.command_payload_types import ReadAnswer
from clusterctl.agent.protocol.frames import INITIAL_CREDIT_BYTES, FrameError
from clusterctl.errors import NotFoundError
from clusterctl.run.controller.controlled_run import ControlledRun
from clusterctl.run.nodes.fan_out import raise_first, read_file_pieces
from clusterctl.run.record.disk_files import is_disk_full, is_resource_shortage
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.thread_ownership import ThreadOwnedAttributes
from clusterctl.session.controller_inbox import AttemptsReplicated, OutputReceived
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import REPLICATED
from clusterctl.validation.session_quota import MAX_FILE_BYTES

_CREDIT_AT_ONCE = INITIAL_CREDIT_BYTES // 8
"""Bytes of credit in one message. A message after each piece would cause too many messages."""

_ACKNOWLEDGE_EVERY = 2.0
_ACKNOWLEDGE_BYTES = 4 * 1024 * 1024
_RETRY = 2.0
_ALL_SECONDS = 60.0
"""Seconds that a node may take to send the ends of all its files. The ends are megabytes if the run has many ranks."""


class Replication(ThreadOwnedAttributes):
    """Writes the replicas of a run, gives credit to the nodes, and acknowledges stored bytes.

    Thread: the loop.

    Args:
        run: The run.
        stored: The function to call with each stored piece of output.
    """

    def __init__(self, run: ControlledRun, stored: Callable[[OutputReceived], None]) -> None:
        self._run, self._on_stored = run, stored
        self._intake = ReplicaQueue(run.writer, self._stored, run.record_note)
        self._sizes: dict[tuple[str, str], int] = {}
        self._acknowledged = 0.0
        self._unacknowledged = 0
        self._pending_credit: dict[Session, int] = {}

    @property
    def is_paused(self) -> bool:
        """Whether replication waits, because the head's disk is full or no more files can be opened."""
        return self._intake.is_paused

    def store_output(self, received: OutputReceived) -> None:
        """Write bytes of a file, or queue them until there is space.

        Raises:
            FrameError: The file belongs to another node, or exceeds the size limit.
        """
        self._validate_owner(received)
        self._intake.store_or_queue(received)

    def _validate_owner(self, received: OutputReceived) -> None:
        place = received.place
        ranks = None if place is None else self._run.find_ranks_on(received.node, place[0])
        if received.run != self._run.folder.run or (place is not None and ranks is not None and place[1] not in ranks):
            raise FrameError(
                f"it sends {received.file} of run {received.run[:80]!a}, a file of another run or another node"
            )
        if received.offset + len(received.payload) > MAX_FILE_BYTES:
            raise FrameError(f"{received.file} has byte {received.offset}; the maximum is {MAX_FILE_BYTES}")

    def mark_attempts_replicated(self, received: AttemptsReplicated) -> None:
        """End the subscription to attempts whose files are completely replicated.

        If replication is paused, the node repeats this message.
        """
        if not self.is_paused:
            self._run.subscriptions.mark_replicated_before(received.node, received.before)

    def _stored(self, received: OutputReceived, size: int) -> None:
        """Count stored bytes, and add the same number of bytes to the credit of the node."""
        self._on_stored(received)
        self._sizes[received.node, received.file] = size
        self._unacknowledged += len(received.payload)
        session = self._run.links.sessions.get(received.node)
        if session is not None:
            self._pending_credit[session] = self._pending_credit.get(session, 0) + len(received.payload)
            if self._pending_credit[session] >= _CREDIT_AT_ONCE:
                session.grant_credit(self._pending_credit.pop(session))

    def _give_credit(self) -> None:
        while self._pending_credit:
            session, count = self._pending_credit.popitem()
            session.grant_credit(count)

    def acknowledge_when_due(self) -> None:
        """Give nodes credit, and periodically acknowledge stored bytes, which nodes with a full disk may drop.

        With many nodes, small credits wait for the next acknowledgement, and large credits are sent now. With few
        nodes, all credits are sent now. This also detects rebooted machines.
        """
        self._intake.retry_queued()
        if not self._run.subscriptions.pace_s:
            self._give_credit()
        self._run.writer.flush()
        pause = _ACKNOWLEDGE_EVERY if self._unacknowledged < _ACKNOWLEDGE_BYTES else _ACKNOWLEDGE_EVERY / 10
        if time.monotonic() - self._acknowledged >= pause:
            self._unacknowledged = 0
            self._acknowledged = time.monotonic()
            self.send_acknowledgements()

    def send_acknowledgements(self) -> None:
        """Send every node the sizes of its replicas, and all pending credit."""
        self._give_credit()
        by_node: dict[str, dict[str, int]] = {}
        for (node, file), size in self._sizes.items():
            by_node.setdefault(node, {})[file] = size
        self._sizes.clear()
        for node, offsets in by_node.items():
            session = self._run.links.sessions.get(node)
            if session is not None:
                REPLICATED.post(session, {"run": self._run.folder.run, "node": node, "offsets": offsets})


_FULL = "the head's disk is full", "the head's disk has space again"

_TOO_MANY = "the head cannot open more files (`ulimit -n`)", "the head can open files again"


class ReplicaQueue:
    """Writes received bytes to replicas, or queues them while the disk is full or no more files can be opened.

    Thread: the loop.

    Args:
        writer: The writer of the run directory.
        stored: The function to call with each stored piece of output and the size of the replica.
        notify_user: The function to call with each message for the user and the level of the message.
    """

    def __init__(
        self,
        writer: RunDirWriter,
        stored: Callable[[OutputReceived, int], None],
        notify_user: Callable[[str, str], None],
    ) -> None:
        self._writer, self._stored, self._notify_user = writer, stored, notify_user
        self._held: deque[OutputReceived] = deque()
        self._why, self._over = _FULL
        self._retry_at = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether received bytes are queued."""
        return bool(self._held)

    def store_or_queue(self, received: OutputReceived) -> None:
        """Write bytes of a file, or queue them until this is possible."""
        if self._held:
            self._held.append(received)
        elif not self._store(received):
            self._held.append(received)
            self._notify_user(f"{self._why}: replication waits, workers are not affected", "warn")

    def retry_queued(self) -> None:
        """Try to write the queued bytes, at most every two seconds."""
        if not self._held or time.monotonic() < self._retry_at:
            return
        while self._held and self._store(self._held[0]):
            self._held.popleft()
        if not self._held:
            self._notify_user(f"{self._over}: replication continues", "info")

    def _store(self, received: OutputReceived) -> bool:
        try:
            size = self._writer.replicate(received.node, received.file, received.offset, received.payload)
        except OSError as error:
            if not is_resource_shortage(error):
                raise
            self._why, self._over = _FULL if is_disk_full(error) else _TOO_MANY
            self._retry_at = time.monotonic() + _RETRY
            return False
        self._stored(received, size)
        return True


_COMPARED_BYTES = 64 * 1024

_COMPARED_OF_EARLIER = 4 * 1024


def find_stale_replicas(
    run: RunDir, node: str, session: Session, attempt: int, *, include_earlier_attempts: bool
) -> list[str]:
    """Return the files of a node whose replica does not match the node's file.

    Only the last bytes of each replica are compared. Bytes that the node has dropped count as equal.

    Args:
        run: The run directory, with the replicas.
        node: The node.
        session: A session with the node.
        attempt: The attempt whose files still grow.
        include_earlier_attempts: Also compare the files of earlier attempts. Another controller may have written their
            replicas.

    Raises:
        ClusterctlError: The node did not answer.
    """
    ends = _list_replica_ends(
        run.node(node),
        os.path.dirname(run_files.format_output_path(attempt, 0)),
        include_earlier_attempts=include_earlier_attempts,
    )
    reads: dict[str, command_payload_types.ReadArguments] = {
        file: {"run": run.run, "node": node, "file": file, "offset": start, "length": size - start}
        for file, (start, size) in ends.items()
    }
    answers, errors = read_file_pieces(session, reads, _ALL_SECONDS)
    raise_first({file: error for file, error in errors.items() if not isinstance(error, NotFoundError)})
    return [file for file, answer in answers.items() if _is_stale(run.node(node) / file, ends[file], answer)]


def _list_replica_ends(base: Path, growing: str, *, include_earlier_attempts: bool) -> dict[str, tuple[int, int]]:
    """Return the replicas to compare. The two numbers are the offset of the first byte to compare, and the size.

    `growing` is the folder of the current attempt. Files outside of attempt folders grow, too.
    """
    ends: dict[str, tuple[int, int]] = {}
    for path in base.rglob("*") if base.is_dir() else ():
        file, size = path.relative_to(base).as_posix(), path.stat().st_size
        ended = os.path.dirname(file) not in ("", growing)
        if size and path.is_file() and file != run_files.JOURNAL_FILE and (include_earlier_attempts or not ended):
            ends[file] = (max(0, size - (_COMPARED_OF_EARLIER if ended else _COMPARED_BYTES)), size)
    return ends


def _is_stale(path: Path, part: tuple[int, int], answer: ReadAnswer) -> bool:
    start, size = part
    first_valid = max(start, int(answer.get("first_valid") or 0))
    theirs = base64.b64decode(answer["data"])[first_valid - int(answer["offset"]) :]
    with path.open("rb") as handle:
        handle.seek(first_valid)
        ours = handle.read(size - first_valid) if first_valid < size else b""
    return ours != theirs[: len(ours)] or len(theirs) < len(ours)
