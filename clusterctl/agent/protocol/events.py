"""The values that travel in frames and stand in journals: what a run asks of a node, and what a node tells of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Union

from clusterctl.agent.protocol.dataclass_json import parse_dataclass
from clusterctl.agent.protocol.frames import FrameError

# --- journal

if TYPE_CHECKING:
    from clusterctl.agent.protocol.process_types import LeftoverProcess, SurvivingProcess


@dataclass(frozen=True)
class Stamp:
    """When and where an event was written.

    Attributes:
        seq: Rises by one in each journal, over restarts of the supervisor too.
        wall: Wall clock of the node, seconds.
        mono: Monotonic clock of the node, seconds; comparable only within one boot.
        boot: Boot id of the node.
    """

    seq: int
    wall: float
    mono: float
    boot: str


@dataclass(frozen=True)
class Prepared:
    """The node is ready for the attempt."""

    KIND: ClassVar[str] = "prepared"
    attempt: int
    ports: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Started:
    """A worker's process is there. `start_time` is in clock ticks since boot (`/proc/PID/stat`, field 22)."""

    KIND: ClassVar[str] = "started"
    attempt: int
    rank: int
    local_rank: int
    pid: int
    start_time: int


@dataclass(frozen=True)
class Exited:
    """A worker is gone.

    Attributes:
        exit_code: Its exit status, or `None` after a signal or where nobody was left to see it.
        signal: Number of the signal that ended it, or `None`.
        stopped: We asked for it; it did not fail by itself.
        earliest: Monotonic clock of the node before which it was still seen alive.
        latest: Monotonic clock when it was seen gone.
        oom: How we know that the kernel killed it for memory: `cgroup`, `kernel log`, `probably`, or `None`.
        error: What it wrote to `TORCHELASTIC_ERROR_FILE`, `{message, traceback}`, or `None`. With exit code 0: how its
            Python failed below a shell that ended with 0 all the same.
        tail: The end of its output (at most 8 KiB), given when it was not stopped, and did not end well or holds
            a traceback.
    """

    KIND: ClassVar[str] = "exited"
    attempt: int
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    stopped: bool = False
    earliest: float = 0.0
    latest: float = 0.0
    oom: str | None = None
    error: dict[str, Any] | None = None
    tail: str = ""


@dataclass(frozen=True)
class Grouped:
    """Workers of the node have formed, or joined, a process group: `ranks` of them in it, `size` of it."""

    KIND: ClassVar[str] = "grouped"
    attempt: int
    ranks: list[int]
    size: int


@dataclass(frozen=True)
class Stopping:
    """SIGTERM has gone out to everything of the attempt on this node.

    Attributes:
        reason: A `StopReason`.
        leaving: Ranks whose process was ending by itself already, though nobody had been told yet.
    """

    KIND: ClassVar[str] = "stopping"
    attempt: int
    reason: str
    grace: float
    exiting_ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Swept:
    """Nothing of the attempt is left, or `remaining`: `[{pid, start_time, command, why}]`. `killed` counts strays.

    Where something remained, a second one without it follows when that is gone.

    Attributes:
        leftovers: What was at work when all workers of the node had ended by themselves, with 0.
        past_grace: What had not ended when the grace of a stop was over, and was killed.
    """

    KIND: ClassVar[str] = "swept"
    attempt: int
    killed: int = 0
    remaining: list[SurvivingProcess] = field(default_factory=list)
    leftovers: list[LeftoverProcess] = field(default_factory=list)
    past_grace: list[LeftoverProcess] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """The run is over on this node; nothing follows."""

    KIND: ClassVar[str] = "finished"
    state: str
    exit_code: int


@dataclass(frozen=True)
class Adopted:
    """A new supervisor goes on where the last one died. `attempt` is -1 before the first."""

    KIND: ClassVar[str] = "adopted"
    attempt: int
    pid: int


@dataclass(frozen=True)
class Dropped:
    """Output before `first_valid` (bytes) is gone from the node.

    Told now and then, and at the end of an attempt: what is gone at any moment stands in the tallies of the node.

    Attributes:
        lost: Bytes, since the last event of that output, which no head had when they went.
    """

    KIND: ClassVar[str] = "dropped"
    attempt: int
    rank: int
    first_valid: int
    lost: int
    why: str


GPU_MEMORY = "gpu_memory"
"""Code of the alarm that memory of a GPU is not free after the attempt that used it."""
FORKED, NOT_FORKED = "forked", "not_forked"
"""Codes of what is said where ranks should be forked: that they were, and what that saves, or why they were not."""
PORT_TAKEN = "port_taken"
"""Code of the alarm that somebody else listens on a port of the workers'; it ends the attempt."""


@dataclass(frozen=True)
class Alarm:
    """Something a person should know: a health change, a full disk, a sampler that died. Shown once in the log view."""

    KIND: ClassVar[str] = "alarm"
    attempt: int
    code: str
    message: str
    severity: str = "warn"
    gpu: int | None = None
    rank: int | None = None


Event = Union[Prepared, Started, Exited, Grouped, Stopping, Swept, Finished, Adopted, Dropped, Alarm]
_EVENTS: dict[str, type[Any]] = {
    c.KIND: c for c in (Prepared, Started, Exited, Grouped, Stopping, Swept, Finished, Adopted, Dropped, Alarm)
}


def encode_event(stamp: Stamp, event: Event) -> str:
    """Return the line of the journal, without its end."""
    record = {**asdict(stamp), "kind": event.KIND, **asdict(event)}
    return json.dumps(record, separators=(",", ":"), ensure_ascii=True)


def decode_event(line: str | bytes) -> tuple[Stamp, Event] | None:
    """Return what a line of a journal says, or `None` for a kind that only a newer agent knows.

    Raises:
        FrameError: The line is torn or not ours.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise FrameError(f"not an event: {line[:80]!r}") from error
    return decode_record(record)


def decode_record(record: Any) -> tuple[Stamp, Event] | None:
    """Return what the object of a line of a journal says (see `decode_event`)."""
    if not isinstance(record, dict) or "kind" not in record:
        raise FrameError(f"not an event: {str(record)[:80]!r}")
    cls = _EVENTS.get(record["kind"])
    return None if cls is None else (parse_dataclass(Stamp, record), parse_dataclass(cls, record))
