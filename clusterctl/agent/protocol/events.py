"""The events of a node's journal, as dataclasses, and their JSON lines.

The head derives validators from the annotations. Fields with a default may be missing in a line.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Union, get_args

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.requests import parse_dataclass

if TYPE_CHECKING:
    from typing import Annotated

    from clusterctl.agent.protocol import wire_types
    from clusterctl.agent.protocol.record_types import (
        ChildFailure,
        LeftoverProcesses,
        OutsideSignal,
        SurvivingProcesses,
        WorkerError,
    )
    from clusterctl.agent.protocol.validators import MaxItems


@dataclass(frozen=True)
class Stamp:
    """Number, time and boot of an event.

    Attributes:
        seq: Rises by one in each journal, also over restarts of the supervisor.
        wall: Wall clock of the node, seconds.
        mono: Monotonic clock of the node, seconds; comparable only within one boot.
        boot: Boot id of the node.
    """

    seq: wire_types.Seq
    wall: float
    mono: float
    boot: wire_types.Word


@dataclass(frozen=True)
class Prepared:
    """The node is ready for the attempt."""

    KIND: ClassVar[str] = "prepared"
    attempt: wire_types.Attempt
    ports: Annotated[list[wire_types.Port], MaxItems(1024)] = field(default_factory=list)


@dataclass(frozen=True)
class Started:
    """A worker was started. `start_time` is in clock ticks since boot (`/proc/PID/stat`, field 22)."""

    KIND: ClassVar[str] = "started"
    attempt: wire_types.Attempt
    rank: wire_types.Rank
    local_rank: wire_types.Rank
    pid: wire_types.Pid
    start_time: wire_types.StartTime


@dataclass(frozen=True)
class Exited:
    """A worker has ended.

    Attributes:
        exit_code: The exit status, or `None` after a signal or if it is unknown.
        signal: The number of the signal that ended it, or `None`.
        stopped: We ended it; it did not fail by itself.
        earliest: Monotonic clock of the node when it was last known to be alive.
        latest: Monotonic clock of the node when it was found to have ended.
        oom: The evidence that the kernel killed it for memory: `cgroup`, `kernel log`, `probably`, or `None`.
        error: Its `TORCHELASTIC_ERROR_FILE`, or `None`. With exit code 0: the failure of a Python below a shell that
            ended with 0 all the same.
        tail: The end of its output (at most 8 KiB). Of one that ended well without a traceback at most 1 KiB; of one
            that was stopped what it had written before that, and only with a traceback.
        outside_signal: With exit code 0: the last SIGTERM or SIGINT that it handled and that we did not send, or
            `None`.
        worked_alone: It ended well, had torch, and was never in a process group with others.
        failed_child: The first process of `multiprocessing`, or script that its Python started, that failed; `None`
            if it was stopped.
        shell_error: What a shell below it said of a command that it could not run or that died, although it ended well.
        output_failure: A line of its output, although it ended well: a framework trained nothing, or a Python that our
            shim did not watch had an exception.
        lacks_python: It ended well, its command names a Python, and none has begun in it.
    """

    KIND: ClassVar[str] = "exited"
    attempt: wire_types.Attempt
    rank: wire_types.Rank
    exit_code: wire_types.ExitCode | None = None
    signal: wire_types.Signal | None = None
    stopped: bool = False
    earliest: float = 0.0
    latest: float = 0.0
    oom: wire_types.Word | None = None
    error: WorkerError | None = None
    tail: wire_types.Text = ""
    outside_signal: OutsideSignal | None = None
    worked_alone: bool = False
    failed_child: ChildFailure | None = None
    shell_error: wire_types.Text = ""
    output_failure: wire_types.Text = ""
    lacks_python: bool = False


@dataclass(frozen=True)
class Grouped:
    """Workers of the node have formed or joined a process group: `ranks` of them, in a group of `size`."""

    KIND: ClassVar[str] = "grouped"
    attempt: wire_types.Attempt
    ranks: Annotated[list[wire_types.Rank], MaxItems(4096)]
    size: wire_types.Rank


@dataclass(frozen=True)
class Stopping:
    """The node has sent SIGTERM to all processes of the attempt.

    Attributes:
        reason: A `StopReason`.
        exiting_ranks: Ranks that were already ending by themselves, although no exit was known yet.
    """

    KIND: ClassVar[str] = "stopping"
    attempt: wire_types.Attempt
    reason: wire_types.Word
    grace: wire_types.NonNegative
    exiting_ranks: Annotated[list[wire_types.Rank], MaxItems(4096)] = field(default_factory=list)


@dataclass(frozen=True)
class Swept:
    """No process of the attempt is left except `remaining`. `killed` counts the processes that had to be killed.

    If some remained, a second event without them follows when they are gone.

    Attributes:
        leftovers: Processes that still worked when all workers of the node had ended by themselves with 0.
        past_grace: Processes that had not ended when the grace of a stop was over, and were killed.
    """

    KIND: ClassVar[str] = "swept"
    attempt: wire_types.Attempt
    killed: int = 0
    remaining: SurvivingProcesses = field(default_factory=list)
    leftovers: LeftoverProcesses = field(default_factory=list)
    past_grace: LeftoverProcesses = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """The run is over on this node; no event follows."""

    KIND: ClassVar[str] = "finished"
    state: wire_types.Word
    exit_code: wire_types.ExitCode


@dataclass(frozen=True)
class Adopted:
    """A new supervisor continues the run after the last one died. `attempt` is -1 before the first attempt."""

    KIND: ClassVar[str] = "adopted"
    attempt: wire_types.Attempt
    pid: wire_types.Pid


@dataclass(frozen=True)
class Dropped:
    """The node has discarded output before `first_valid` (bytes).

    Written now and then, and at the end of an attempt. The offset files of the node have the exact state at any moment.

    Attributes:
        lost: Bytes since the last such event that no head had received when they were discarded.
    """

    KIND: ClassVar[str] = "dropped"
    attempt: wire_types.Attempt
    rank: wire_types.Rank
    first_valid: wire_types.Bytes
    lost: wire_types.Bytes
    why: wire_types.Text


GPU_MEMORY = "gpu_memory"
"""Code of the alarm that GPU memory is still in use after the attempt that used it."""
FORKED, NOT_FORKED = "forked", "not_forked"
"""Codes of the notes about forked ranks: the time that forking saved, or why ranks were not forked."""
PORT_TAKEN = "port_taken"
"""Code of the alarm that another user listens on a port of the workers; it ends the attempt."""


@dataclass(frozen=True)
class Alarm:
    """A note for people: a health change, a full disk, a dead sampler. The log view shows it once."""

    KIND: ClassVar[str] = "alarm"
    attempt: wire_types.Attempt
    code: wire_types.Word
    message: wire_types.Text
    severity: wire_types.Word = "warn"
    gpu: wire_types.GpuIndex | None = None
    rank: wire_types.Rank | None = None


Event = Union[Prepared, Started, Exited, Grouped, Stopping, Swept, Finished, Adopted, Dropped, Alarm]
EVENT_CLASSES: dict[str, type[Any]] = {event.KIND: event for event in get_args(Event)}
"""Kind of an event to its class. A newer agent may write other kinds, which every reader ignores."""


def encode_event(stamp: Stamp, event: Event) -> str:
    """Return the journal line of an event, without the newline."""
    record = {**asdict(stamp), "kind": event.KIND, **asdict(event)}
    return json.dumps(record, separators=(",", ":"), ensure_ascii=True)


def decode_event(line: str | bytes) -> tuple[Stamp, Event] | None:
    """Return the event of a journal line, or `None` if only a newer agent knows its kind.

    Raises:
        FrameError: The line is incomplete or not ours.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise FrameError(f"not an event: {line[:80]!r}") from error
    return decode_record(record)


def decode_record(record: Any) -> tuple[Stamp, Event] | None:
    """Return the event of a parsed journal line (see `decode_event`)."""
    if not isinstance(record, dict) or "kind" not in record:
        raise FrameError(f"not an event: {str(record)[:80]!r}")
    cls = EVENT_CLASSES.get(record["kind"])
    return None if cls is None else (parse_dataclass(Stamp, record), parse_dataclass(cls, record))
