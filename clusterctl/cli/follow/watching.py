"""Watching a run: look at its files, wait until its controller has written something, look again."""

from __future__ import annotations

import math
import select
import socket
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.events import Exited
from clusterctl.run.controller.control_socket import ChangeSubscription
from clusterctl.run.record.state_reader import StateReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.record.state_reader import ControllerNews, NodeNews
    from clusterctl.run.rules.state import RunState

_LOOK_SECONDS = 1.0
"""Look at the latest after so long: no bell rings without a controller, or with one on another machine."""

_STALE_SECONDS = 5.0
"""For so long what another machine wrote on a shared home may stay unseen; a lock that is free is seen at once."""


class Course(Enum):
    """Where a run stands at a look."""

    ATTENDED = "attended"
    UNATTENDED = "unattended"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a look has found.

    Attributes:
        heads: New events of the controller.
        nodes: New events of the nodes.
        state: What is known of the run now.
    """

    heads: list[ControllerNews]
    nodes: list[NodeNews]
    state: RunState
    course: Course

    @property
    def exits(self) -> list[tuple[str, float, Exited]]:
        """Node, wall clock (of the head) and event of each worker that is gone now."""
        ended = [(node, stamp, event) for node, stamp, event in self.nodes if isinstance(event, Exited)]
        return [(node, stamp.wall - self.state.ahead(node), event) for node, stamp, event in ended]


class Watching:
    """Looks at one run again and again; what to do with a look is left to the command.

    Args:
        run: Which.
        stale: For so many seconds the last words of a controller on another machine may be on their way.
    """

    def __init__(self, run: RunDir, *, stale: float = _STALE_SECONDS) -> None:
        self.run = run
        self._stale = stale
        # Before the first look too: a controller elsewhere may have ended just now.
        self._attended_at = time.monotonic()
        self._reader = StateReader(run)
        self._bell = ChangeSubscription(run)

    @property
    def state(self) -> RunState:
        """What is known of the run since the last look."""
        return self._reader.state

    def look(self) -> Look:
        """Read what is new."""
        # Before the files are read: what a controller writes last is then among what is read after it has gone.
        attended = self._bell.clear() or self.run.is_attended
        heads, nodes = self._reader.refresh()
        return Look(heads=heads, nodes=nodes, state=self.state, course=self._course(attended=attended))

    def looks(self, until: Callable[[], float] = lambda: math.inf) -> Iterator[Look]:
        """Yield a look now and after each `wait`; the last one is of a run that is over or unattended."""
        while True:
            look = self.look()
            yield look
            if look.course is not Course.ATTENDED:
                return
            self.wait(until=until())

    def wait(self, *others: int, until: float = math.inf) -> list[int]:
        """Wait for the bell, or until one of the other descriptors can be read; return those that can.

        Args:
            others: What else wakes, e.g. the keyboard.
            until: When the next look is due at the latest, on the monotonic clock.
        """
        bell = self._bell.fileno()
        descriptors = [*others] if bell is None else [bell, *others]
        seconds = min(_LOOK_SECONDS, max(0.0, until - time.monotonic()))
        return select.select(descriptors, [], [], seconds)[0]

    def close(self) -> None:
        """Let go of the bell."""
        self._bell.close()

    def _course(self, *, attended: bool) -> Course:
        if self.state.over:
            return Course.OVER
        if attended or self._taken_over():
            self._attended_at = time.monotonic()
            return Course.ATTENDED
        return Course.ATTENDED if self._words_on_their_way() else Course.UNATTENDED

    def _words_on_their_way(self) -> bool:
        """Return whether the controller was here a moment ago, on a machine whose last lines come late."""
        if time.monotonic() - self._attended_at >= self._stale:
            return False
        controller = self.run.controller
        return controller is not None and controller.host != socket.gethostname()

    def _taken_over(self) -> bool:
        """Return whether a new controller has come in the place of the one that has gone."""
        self._bell = ChangeSubscription(self.run)
        return self._bell.fileno() is not None or self.run.is_attended
