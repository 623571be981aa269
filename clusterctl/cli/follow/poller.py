"""Polls a run: reads its files, waits until its controller has written, and reads again."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from clusterctl.agent.protocol.events import Exited
from clusterctl.errors import ExitCode
from clusterctl.run.controller.control_socket import ChangeSubscription
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import StampedNodeEvent, StateReader, TimedControllerEvent
from clusterctl.run.rules.state import RunState

_POLL_S = 1.0
"""Longest pause between polls. A controller on another machine cannot report changes."""

_MAX_WRITE_DELAY_S = 5.0
"""Longest delay until the writes of another machine appear on a shared home. The release of a lock appears at once."""


class RunAttendance(Enum):
    """Says whether a run has a controller, has none, or is over."""

    ATTENDED = "attended"
    UNATTENDED = "unattended"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The result of one reading of a run's files.

    Attributes:
        new_controller_events: New events of the controller.
        new_node_events: New events of the nodes.
        state: The state of the run after these events.
    """

    new_controller_events: list[TimedControllerEvent]
    new_node_events: list[StampedNodeEvent]
    state: RunState
    attendance: RunAttendance

    @property
    def worker_exits(self) -> list[tuple[str, float, Exited]]:
        """For each exit of a worker: node, time (wall clock of the head) and event."""
        ended = [(node, stamp, event) for node, stamp, event in self.new_node_events if isinstance(event, Exited)]
        return [(node, stamp.wall - self.state.clock_ahead_s(node), event) for node, stamp, event in ended]


class RunPoller:
    """Reads new events of one run repeatedly.

    Args:
        run: The run.
        write_delay: Seconds until this machine sees the writes of a controller on another machine.
    """

    def __init__(self, run: RunDir, *, write_delay: float = _MAX_WRITE_DELAY_S) -> None:
        self.run = run
        self._write_delay = write_delay
        # A controller on another machine may have ended just before the first poll.
        self._attended_at = time.monotonic()
        self._reader = StateReader(run)
        self._subscription = ChangeSubscription(run)

    @property
    def state(self) -> RunState:
        """The state of the run at the last poll."""
        return self._reader.state

    def poll(self) -> RunSnapshot:
        """Read the new events of the run."""
        # Check the controller before reading the files: if the controller then ends, its last writes are still read.
        attended = self._subscription.read_notifications() or self.run.is_attended
        new_controller_events, new_node_events = self._reader.refresh()
        return RunSnapshot(
            new_controller_events=new_controller_events,
            new_node_events=new_node_events,
            state=self.state,
            attendance=self._get_attendance(has_controller=attended),
        )

    def watch(self, next_poll_at: Callable[[], float] = lambda: math.inf) -> Iterator[RunSnapshot]:
        """Yield a snapshot now and after each change, until the run has ended or has no controller."""
        while True:
            snapshot = self.poll()
            yield snapshot
            if snapshot.attendance is not RunAttendance.ATTENDED:
                return
            self.wait_for_change(until=next_poll_at())

    def wait_for_change(self, *more_fds: int, until: float = math.inf) -> list[int]:
        """Wait until the controller reports a change or a descriptor is readable; return the readable descriptors.

        Args:
            more_fds: Further descriptors to wait for, e.g. the keyboard.
            until: The latest time of the next poll, on the monotonic clock.
        """
        change_fd = self._subscription.fileno()
        descriptors = [*more_fds] if change_fd is None else [change_fd, *more_fds]
        seconds = min(_POLL_S, max(0.0, until - time.monotonic()))
        return select.select(descriptors, [], [], seconds)[0]

    def close(self) -> None:
        """End the subscription to changes."""
        self._subscription.close()

    def _get_attendance(self, *, has_controller: bool) -> RunAttendance:
        if self.state.is_over:
            return RunAttendance.OVER
        if has_controller or self._has_new_controller():
            self._attended_at = time.monotonic()
            return RunAttendance.ATTENDED
        return RunAttendance.ATTENDED if self._may_miss_late_writes() else RunAttendance.UNATTENDED

    def _may_miss_late_writes(self) -> bool:
        """Return whether the last writes of a controller on another machine may not be visible yet."""
        if time.monotonic() - self._attended_at >= self._write_delay:
            return False
        controller = self.run.last_controller
        return controller is not None and controller.host != socket.gethostname()

    def _has_new_controller(self) -> bool:
        """Return whether a new controller has replaced the previous one."""
        self._subscription = ChangeSubscription(self.run)
        return self._subscription.fileno() is not None or self.run.is_attended


def wait_for_end(run: RunDir, end: float) -> tuple[RunState, int | None]:
    """Wait for the end of the run. Return the run's last state, and an exit code if the run has not ended.

    Args:
        run: The run.
        end: The monotonic time at which to stop waiting.
    """
    with contextlib.closing(RunPoller(run)) as poller:
        for snapshot in poller.watch(lambda: end):
            if snapshot.attendance is RunAttendance.ATTENDED and time.monotonic() >= end:
                return snapshot.state, int(ExitCode.WAIT_TIMED_OUT)
            if snapshot.attendance is RunAttendance.UNATTENDED:
                return snapshot.state, int(ExitCode.UNATTENDED)
        return poller.state, None
