"""What nodes send of their files: into the replicas, and back to the node how much of it is safe here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.door.answers import place_of
from clusterctl.door.bounds import MOST_FILE
from clusterctl.run.intake import Intake

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.run.controller.run import ControlledRun
    from clusterctl.session.conversation import OutputReceived, WholeReceived

_ACKNOWLEDGE_EVERY = 2.0
_ACKNOWLEDGE_BYTES = 4 * 1024 * 1024


class Replication:
    """The replicas of a run.

    Args:
        run: The run.
        stored: Called with what has become safe.
    """

    def __init__(self, run: ControlledRun, stored: Callable[[OutputReceived], None]) -> None:
        self._run, self._told = run, stored
        self._intake = Intake(run.writer, self._stored, run.note)
        self._sizes: dict[tuple[str, str], int] = {}
        self._acknowledged = 0.0
        self._unacknowledged = 0

    @property
    def paused(self) -> bool:
        """The head's disk is full."""
        return self._intake.paused

    def take(self, item: OutputReceived) -> None:
        """Write bytes of a file, or hold them until there is space again.

        Raises:
            FrameError: The node has no such file, or the file cannot be that long.
        """
        self._must_be_its_own(item)
        self._intake.take(item)

    def _must_be_its_own(self, item: OutputReceived) -> None:
        place = place_of(item.file)
        ranks = None if place is None else self._run.ranks_on(item.node, place[0])
        if item.run != self._run.folder.run or (place is not None and ranks is not None and place[1] not in ranks):
            raise FrameError(f"it sends {item.file} of {item.run[:80]!a}, which is not its own")
        if item.offset + len(item.payload) > MOST_FILE:
            raise FrameError(f"{item.file} has byte {item.offset}, and {MOST_FILE} are the most")

    def whole(self, item: WholeReceived) -> None:
        """Ask a node no more for what it has sent all of; where some is held back here, the node will say so again."""
        if not self.paused:
            self._run.following.is_whole(item.node, item.before)

    def _stored(self, item: OutputReceived, size: int) -> None:
        """Let a node send as much again as is safe here now."""
        self._told(item)
        self._sizes[item.node, item.file] = size
        self._unacknowledged += len(item.payload)
        session = self._run.links.sessions.get(item.node)
        if session is not None:
            session.credit(len(item.payload))

    def acknowledge(self) -> None:
        """Tell nodes now and then what is safe here, so that a full disk there costs nothing."""
        self._intake.retry()
        self._run.writer.flush()
        pause = _ACKNOWLEDGE_EVERY if self._unacknowledged < _ACKNOWLEDGE_BYTES else _ACKNOWLEDGE_EVERY / 10
        if time.monotonic() - self._acknowledged >= pause:
            self._unacknowledged = 0
            self._acknowledged = time.monotonic()
            self.tell_what_is_safe()

    def tell_what_is_safe(self) -> None:
        """Tell every node up to where the replicas of its files go."""
        by_node: dict[str, dict[str, int]] = {}
        for (node, file), size in self._sizes.items():
            by_node.setdefault(node, {})[file] = size
        self._sizes.clear()
        for node, offsets in by_node.items():
            session = self._run.links.sessions.get(node)
            if session is not None:
                session.post(Command.REPLICATED, {"run": self._run.folder.run, "node": node, "offsets": offsets})
