"""What a session tells whoever reads it: events, output, beats, and its own end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from clusterctl.agent.protocol.events import Event, Stamp
    from clusterctl.errors import (
        NodeError,
    )


@dataclass(frozen=True, slots=True)
class EventReceived:
    """A line of a journal. `record` is the line as an object, with fields that only a newer agent knows."""

    node: str
    run: str
    stamp: Stamp
    event: Event
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OutputReceived:
    """Bytes of a file of a run, which begin at `offset` in it. They are on credit: give it back once they are safe."""

    node: str
    run: str
    file: str
    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class WholeReceived:
    """All that the node has of attempts before that number was received."""

    node: str
    run: str
    before: int


@dataclass(frozen=True, slots=True)
class StreamReceived:
    """Bytes of a stream that one of our requests named, and that nobody `listen`s to."""

    node: str
    stream: int
    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class BeatReceived:
    """The agent lives, and its clocks read so much more than ours, each give or take `error_s` (seconds).

    Attributes:
        wall_offset_s: Node's wall clock minus ours.
        mono_offset_s: Node's monotonic clock minus ours.
        error_s: Half the time that the question took to come back.
        boot: Boot id of the node.
    """

    node: str
    wall_offset_s: float
    mono_offset_s: float
    error_s: float
    boot: str


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The conversation is over although we did not end it. The last thing that a session puts into an inbox."""

    node: str
    error: NodeError


@dataclass(frozen=True, slots=True)
class Superseded:
    """The node obeys a later controller of this run: this one must stop acting."""

    node: str


Item = EventReceived | OutputReceived | WholeReceived | StreamReceived | BeatReceived | SessionLost | Superseded


class Sink(Protocol):
    """Where a session puts what arrives: a queue. One that is full may make it wait."""

    def put(self, item: Item) -> None:
        """Add an item."""
