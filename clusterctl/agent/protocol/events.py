"""The events of a node's journal as dataclasses, and their conversion to and from JSON lines.

The head derives the validators of journal lines from the annotations. A journal line may lack the fields that have a
default.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Union, get_args

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.run_requests import parse_dataclass

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
    """The sequence number, the time and the boot id of an event.

    Attributes:
        seq: The number of the event in the journal. The number rises by one, and a new supervisor continues the
            sequence.
        wall: The node's wall clock in seconds.
        mono: The node's monotonic clock in seconds; comparable only within one boot.
        boot: The boot id of the node.
    """

    seq: wire_types.Seq
    wall: float
    mono: float
    boot: wire_types.Word


@dataclass(frozen=True)
class Prepared:
    """The node is ready for the attempt. `python` is the workers' interpreter, `image` the one of their container."""

    KIND: ClassVar[str] = "prepared"
    attempt: wire_types.Attempt
    ports: Annotated[list[wire_types.Port], MaxItems(1024)] = field(default_factory=list)
    python: wire_types.Path = ""
    image: wire_types.Path = ""


@dataclass(frozen=True)
class Started:
    """A worker has started. `start_time` is in clock ticks since boot (`/proc/PID/stat`, field 22)."""

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
        exit_code: The exit code; `None` if a signal ended the worker or the exit status is unknown.
        signal: The number of the signal that ended the worker, or `None`.
        stopped: Whether clusterctl ended the worker, which then did not fail by itself.
        earliest: The last time at which the worker was known to be alive, on the node's monotonic clock.
        latest: The time at which the supervisor or waiter noticed the exit, on the node's monotonic clock.
        oom: The evidence that the kernel killed the worker for lack of memory: `cgroup`, `kernel log`, `probably`, or
            `None`.
        error: The content of the worker's `TORCHELASTIC_ERROR_FILE`, or `None`. With exit code 0, the failure of a
            Python whose parent shell ended with 0.
        tail: The end of the worker's output (at most 8 KiB; at most 1 KiB after exit code 0 without a traceback). For a
            stopped worker, the traceback that the worker wrote before the stop, if any.
        outside_signal: With exit code 0, the last SIGTERM or SIGINT that the worker handled and clusterctl did not
            send, or `None`.
        worked_alone: Whether the worker ended with 0, used torch, and never joined a process group with other ranks.
        failed_child: The first failed child of the worker's Python: a process of `multiprocessing`, or a script. `None`
            if the worker was stopped.
        shell_error: With exit code 0, the message of a shell of the worker about a command that could not run or died.
        output_failure: With exit code 0, an output line which shows a failure: a framework trained nothing, or a Python
            without clusterctl's shim had an exception.
        lacks_python: Whether the worker ended with 0 and no Python ran in it, although its command names a Python.
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
class GroupJoined:
    """Workers of the node have joined a process group of `size` members.

    `ranks` are the ranks of these workers in the group.
    """

    KIND: ClassVar[str] = "grouped"
    attempt: wire_types.Attempt
    ranks: Annotated[list[wire_types.Rank], MaxItems(4096)]
    size: wire_types.Rank


@dataclass(frozen=True)
class Stopping:
    """The node has sent SIGTERM to all processes of the attempt.

    Attributes:
        reason: A `StopReason`.
        exiting_ranks: The ranks that were already ending by themselves, although no exit was recorded yet.
    """

    KIND: ClassVar[str] = "stopping"
    attempt: wire_types.Attempt
    reason: wire_types.Word
    grace: wire_types.NonNegative
    exiting_ranks: Annotated[list[wire_types.Rank], MaxItems(4096)] = field(default_factory=list)


@dataclass(frozen=True)
class Swept:
    """All processes of the attempt have ended, except `remaining`. `killed` counts the processes that were killed.

    If processes remained, a second `swept` event follows when these processes have ended.

    Attributes:
        leftovers: The processes that still ran when all workers of the node had ended by themselves with 0.
        past_grace: The processes that still ran at the end of the grace of a stop, and were then killed.
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
class RunAdopted:
    """A new supervisor continues the run after the previous supervisor died.

    Before the first attempt `attempt` is -1.
    """

    KIND: ClassVar[str] = "adopted"
    attempt: wire_types.Attempt
    pid: wire_types.Pid


@dataclass(frozen=True)
class OutputDropped:
    """The node has discarded the output of a rank before the offset `first_valid` (bytes).

    The supervisor writes this event from time to time, and at the end of an attempt. The offset files of the node are
    always exact.

    Attributes:
        lost: The number of bytes that the node has discarded since the previous such event and that the head had not
            received.
    """

    KIND: ClassVar[str] = "dropped"
    attempt: wire_types.Attempt
    rank: wire_types.Rank
    first_valid: wire_types.Bytes
    lost: wire_types.Bytes
    why: wire_types.Text


GPU_MEMORY = "gpu_memory"
"""The code of the alarm that GPU memory is still in use after the end of an attempt."""
FORKED, NOT_FORKED = "forked", "not_forked"
"""The codes of two alarms that are only notes: the time that forking saved, and the reason why ranks were not forked.
"""
PORT_TAKEN = "port_taken"
"""The code of the alarm that another user listens on a port of the workers. This alarm ends the attempt."""


@dataclass(frozen=True)
class Alarm:
    """A message for the user, as about a full disk or a dead sampler. `clusterctl logs` shows the message once."""

    KIND: ClassVar[str] = "alarm"
    attempt: wire_types.Attempt
    code: wire_types.Word
    message: wire_types.Text
    severity: wire_types.Word = "warn"
    gpu: wire_types.GpuIndex | None = None
    rank: wire_types.Rank | None = None


Event = Union[Prepared, Started, Exited, GroupJoined, Stopping, Swept, Finished, RunAdopted, OutputDropped, Alarm]
EVENT_CLASSES: dict[str, type[Any]] = {event.KIND: event for event in get_args(Event)}
"""The class of each kind of event. A newer agent may write other kinds, which every reader ignores."""


def encode_event(stamp: Stamp, event: Event) -> str:
    """Return the journal line of an event, without the newline."""
    record = {**asdict(stamp), "kind": event.KIND, **asdict(event)}
    return json.dumps(record, separators=(",", ":"), ensure_ascii=True)


def decode_event(line: str | bytes) -> tuple[Stamp, Event] | None:
    """Return the event of a journal line, or `None` if this version does not know the kind of the event.

    Raises:
        FrameError: The line is incomplete, or is not an event.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise FrameError(f"not an event: {line[:80]!r}") from error
    return decode_event_record(record)


def decode_event_record(record: Any) -> tuple[Stamp, Event] | None:
    """Return the event of a journal line whose JSON is already decoded (see `decode_event`)."""
    if not isinstance(record, dict) or "kind" not in record:
        raise FrameError(f"not an event: {str(record)[:80]!r}")
    cls = EVENT_CLASSES.get(record["kind"])
    return None if cls is None else (parse_dataclass(Stamp, record), parse_dataclass(cls, record))
