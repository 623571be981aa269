"""What a journal means: the state of a run on this node. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import events

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class NodeState:
    """A run on a node, as its journal tells it; ranks, ports and how they end are of the newest attempt.

    Attributes:
        seq: Of the last event.
        attempt: The newest attempt, -1 before the first.
        finished: The run is over.
        boot: Boot id of the last event: another one now means that nothing of the run is left.
        started_in: Boot id in which each rank was started.
        stopping: When SIGTERM went out (monotonic), with the event.
        dropped: Per attempt and rank, up to where output was given up, and how many bytes of that no head has.
        began: When the run was prepared first (wall clock).
        ended: When it was finished (wall clock).
    """

    seq: int = 0
    attempt: int = -1
    finished: events.Finished | None = None
    boot: str = ""
    ports: list[int] = field(default_factory=list)
    started: dict[int, events.Started] = field(default_factory=dict)
    started_in: dict[int, str] = field(default_factory=dict)
    exited: dict[int, events.Exited] = field(default_factory=dict)
    stopping: tuple[float, events.Stopping] | None = None
    swept: events.Swept | None = None
    dropped: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    began: float | None = None
    ended: float | None = None

    @property
    def state(self) -> str:
        """Return where the node is: `new, prepared, started, stopping, exited, swept, finished`."""
        if self.finished is not None:
            return "finished"
        if self.swept is not None:
            return "swept"
        if self.stopping is not None:
            return "stopping"
        if self.started:
            return "exited" if self.started.keys() <= self.exited.keys() else "started"
        return "prepared" if self.attempt >= 0 else "new"


def apply(state: NodeState, stamp: events.Stamp, event: events.Event) -> None:
    """Take one event into a state."""
    state.seq, state.boot = stamp.seq, stamp.boot
    if isinstance(event, events.Prepared):
        state.attempt, state.ports = event.attempt, event.ports
        state.started, state.started_in, state.exited = {}, {}, {}
        state.stopping, state.swept = None, None
        if state.began is None:
            state.began = stamp.wall
    elif isinstance(event, events.Started):
        state.started[event.rank], state.started_in[event.rank] = event, stamp.boot
    elif isinstance(event, events.Exited):
        state.exited[event.rank] = event
    elif isinstance(event, events.Stopping):
        state.stopping = state.stopping or (stamp.mono, event)
    elif isinstance(event, events.Swept):
        state.swept = event
    elif isinstance(event, events.Finished):
        state.finished, state.ended = event, stamp.wall
    elif isinstance(event, events.Dropped):
        key = (event.attempt, event.rank)
        first_valid, lost = state.dropped.get(key, (0, 0))
        state.dropped[key] = (max(first_valid, event.first_valid), lost + event.lost)


def fold(entries: Iterable[tuple[events.Stamp, events.Event]]) -> NodeState:
    """Return what a whole journal means."""
    state = NodeState()
    for stamp, event in entries:
        apply(state, stamp, event)
    return state
