"""Polling a run: read its files, wait until its controller has written something, read again."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from clusterctl.agent.protocol.events import Exited
from clusterctl.run.controller.control_socket import ChangeSubscription
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import ControllerNews, NodeNews, StateReader
from clusterctl.run.rules.state import RunState

_POLL_S = 1.0
"""Longest pause between polls: without a controller on this machine, nothing reports changes."""

_STALE_S = 5.0
"""Longest delay until writes of another machine appear on a shared home; a released lock appears at once."""


class RunStatus(Enum):
    """Whether a run has a controller, or is over."""

    ATTENDED = "attended"
    UNATTENDED = "unattended"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The result of a poll.

    Attributes:
        heads: New events of the controller.
        nodes: New events of the nodes.
        state: The run now.
    """

    heads: list[ControllerNews]
    nodes: list[NodeNews]
    state: RunState
    status: RunStatus

    @property
    def exits(self) -> list[tuple[str, float, Exited]]:
        """Node, time (wall clock of the head) and event of each worker that ended."""
        ended = [(node, stamp, event) for node, stamp, event in self.nodes if isinstance(event, Exited)]
        return [(node, stamp.wall - self.state.ahead(node), event) for node, stamp, event in ended]


class RunPoller:
    """Polls one run; the command decides what to do with each snapshot.

    Args:
        run: The run.
        stale: Seconds by which the last events of a controller on another machine may be delayed.
    """

    def __init__(self, run: RunDir, *, stale: float = _STALE_S) -> None:
        self.run = run
        self._stale = stale
        # A controller on another machine may have ended just before the first poll.
        self._attended_at = time.monotonic()
        self._reader = StateReader(run)
        self._bell = ChangeSubscription(run)

    @property
    def state(self) -> RunState:
        """The run as of the last poll."""
        return self._reader.state

    def poll(self) -> Snapshot:
        """Read the new events."""
        # Asked before the files are read, so that the last writes of a controller that has ended are read too.
        attended = self._bell.clear() or self.run.is_attended
        heads, nodes = self._reader.refresh()
        return Snapshot(heads=heads, nodes=nodes, state=self.state, status=self._status(attended=attended))

    def snapshots(self, until: Callable[[], float] = lambda: math.inf) -> Iterator[Snapshot]:
        """Yield a snapshot now and after each change; the last one is of a run that is over or unattended."""
        while True:
            snapshot = self.poll()
            yield snapshot
            if snapshot.status is not RunStatus.ATTENDED:
                return
            self.wait_for_change(until=until())

    def wait_for_change(self, *others: int, until: float = math.inf) -> list[int]:
        """Wait for a change by the controller, or for another readable descriptor; return the readable descriptors.

        Args:
            others: Further descriptors, e.g. the keyboard.
            until: When the next poll is due at the latest, on the monotonic clock.
        """
        bell = self._bell.fileno()
        descriptors = [*others] if bell is None else [bell, *others]
        seconds = min(_POLL_S, max(0.0, until - time.monotonic()))
        return select.select(descriptors, [], [], seconds)[0]

    def close(self) -> None:
        """End the subscription to changes."""
        self._bell.close()

    def _status(self, *, attended: bool) -> RunStatus:
        if self.state.over:
            return RunStatus.OVER
        if attended or self._has_new_controller():
            self._attended_at = time.monotonic()
            return RunStatus.ATTENDED
        return RunStatus.ATTENDED if self._may_lag() else RunStatus.UNATTENDED

    def _may_lag(self) -> bool:
        """Return whether the last writes of a controller on another machine may still be on their way."""
        if time.monotonic() - self._attended_at >= self._stale:
            return False
        controller = self.run.controller
        return controller is not None and controller.host != socket.gethostname()

    def _has_new_controller(self) -> bool:
        """Return whether a new controller has replaced the previous one."""
        self._bell = ChangeSubscription(self.run)
        return self._bell.fileno() is not None or self.run.is_attended
