"""The values that travel in frames and stand in journals: what a run asks of a node, and what a node tells of it.

People who import them do so from `clusterctl.agent.protocol.commands`, which gives them when they are first used.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, TypeVar, Union

from clusterctl.agent.protocol.commands import CREDIT_BYTES, FrameError

T = TypeVar("T")


def from_wire(cls: type[T], value: dict[str, Any]) -> T:
    """Return a dataclass of flat fields from a peer's object; fields we do not know are left out.

    Raises:
        FrameError: A field that must be there is not.
    """
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    try:
        return cls(**{k: v for k, v in value.items() if k in known})
    except TypeError as error:
        raise FrameError(f"{cls.__name__}: {error}") from error


def to_wire(value: Any) -> dict[str, Any]:
    """Return a dataclass as the object that `from_wire` reads."""
    return asdict(value)


@dataclass(frozen=True)
class Prepare:
    """Make one node ready for one attempt. Repeating it for the same attempt answers the same.

    Attributes:
        ports: TCP ports to hold until the run's end; 0 for any free one, which is held until the next attempt.
        gpus: Device indices that the run claims on this node; empty for none.
        ranks: Ranks whose output files get reserved space.
        reserve: Bytes reserved beyond the end of each output file.
        max_size: Bytes after which the oldest replicated output is punched out; `None` for never.
        grace: Seconds between SIGTERM and SIGKILL when the node stops by itself.
        stop_after: Seconds without a controller's frame after which the node stops the run; `None` for never.
        workdir: Folder of the code, already there; made if it is missing.
        code_hash: Of the manifest that was synced; refused where the workdir is not like it. `None` without a sync.
        python: What the user named, or `None`; the answer names the interpreter to use.
        python_hint: A path to try first where the user named none (the head's own interpreter).
        sample_seconds: Interval of activity samples.
        health_seconds: Interval of GPU and host samples; 0 turns them off.
    """

    run: str
    node: str
    attempt: int
    workdir: str
    name: str = ""
    ports: list[int] = field(default_factory=list)
    gpus: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    reserve: int = 64 * 1024 * 1024
    max_size: int | None = None
    grace: float = 10.0
    stop_after: float | None = None
    python: str | None = None
    python_hint: str | None = None
    sample_seconds: float = 2.0
    health_seconds: float = 15.0
    watch: list[str] = field(default_factory=list)
    code_hash: str | None = None


@dataclass(frozen=True)
class WorkerStart:
    """One worker of an attempt. `argv` is executed as it is, after `prologue` (run by bash) where there is one.

    Attributes:
        hosts: Where `argv` is not a worker but a launcher: the ranks that it starts, by local rank.
        hosted: What such a launcher starts as each of them; put behind `argv`.
    """

    rank: int
    local_rank: int
    argv: list[str]
    env: dict[str, str]
    prologue: str | None = None
    hosts: list[int] = field(default_factory=list)
    hosted: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Start:
    """Start the workers of a prepared attempt; all of the node at once.

    Attributes:
        workers: Wire form of `WorkerStart`.
        secrets: Merged over each worker's environment; kept on a tmpfs (0600) only while `keep_secrets`.
        keep_secrets: A later attempt may need them again.
        inject: Put our `sitecustomize` first on PYTHONPATH.
    """

    run: str
    node: str
    attempt: int
    workers: list[dict[str, Any]]
    secrets: dict[str, str] = field(default_factory=dict)
    keep_secrets: bool = False
    inject: bool = True


@dataclass(frozen=True)
class Stop:
    """Stop the attempt: SIGTERM and SIGCONT to every group, `grace` seconds, SIGKILL, sweep until empty twice.

    Repeating it may shorten the grace, never lengthen it. `reason` is one of `StopReason`.
    """

    run: str
    node: str
    grace: float
    reason: str


@dataclass(frozen=True)
class Follow:
    """Send the journal after `seq`, and each file of the run from its cursor (bytes; 0 where none is named).

    Of attempts before number `whole` everything was received: nothing of their files is sent.
    """

    run: str
    node: str
    seq: int
    cursors: dict[str, int] = field(default_factory=dict)
    credit: int = CREDIT_BYTES
    whole: int = 0


class StopReason(str, Enum):
    """Who or what asked for the end of an attempt."""

    PEER_FAILED = "peer_failed"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    TIME_LIMIT = "time_limit"
    FENCE = "fence"
    NODE_LOST = "node_lost"
    START_FAILED = "start_failed"
    RESTART = "restart"
    FINISHED = "finished"
    UNHEALTHY = "unhealthy"
    PORT_TAKEN = "port_taken"


# --- journal


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
        error: What it wrote to `TORCHELASTIC_ERROR_FILE`, `{message, traceback}`, or `None`.
        tail: The end of its output (at most 8 KiB), given when it did not end well and was not stopped.
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
    leaving: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Swept:
    """Nothing of the attempt is left, or `remaining`: `[{pid, start_time, command, why}]`. `killed` counts strays.

    Where something remained, a second one without it follows when that is gone.
    """

    KIND: ClassVar[str] = "swept"
    attempt: int
    killed: int = 0
    remaining: list[dict[str, Any]] = field(default_factory=list)


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


Event = Union[Prepared, Started, Exited, Stopping, Swept, Finished, Adopted, Dropped, Alarm]
_EVENTS: dict[str, type[Any]] = {
    c.KIND: c for c in (Prepared, Started, Exited, Stopping, Swept, Finished, Adopted, Dropped, Alarm)
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
    return None if cls is None else (from_wire(Stamp, record), from_wire(cls, record))
