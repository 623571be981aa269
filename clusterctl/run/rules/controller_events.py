"""The events in the journal of a controller: actions, decisions, and changes of links, stalls and health. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, get_args

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.record_types import RemainingProcess
from clusterctl.agent.protocol.run_requests import parse_dataclass
from clusterctl.errors import ClusterctlError, NodesError, UnhealthyError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCreated:
    """The run exists. This is the first event of a journal."""

    KIND: ClassVar[str] = "created"
    run: str
    name: str
    path: str


WAIT_STEP = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStepProgress:
    """The progress of a step of the start.

    Attributes:
        name: The step: connect, wait (for GPUs), health, sync, resume, prepare or start.
        done: How many nodes (for `start`: workers) have finished the step.
        total: How many nodes or workers there are.
        waiting: A list of `[node, what it waits for]`, slowest first.
        detail: The result of the finished step, for people.
        seconds: Seconds since the step began.
        ended: The step is over.
        failed: The step is over because it failed.
        nodes: After the end: the seconds until each node had finished the step.
        parts: After the end: for each node, the longest part of the step and its duration in seconds.
    """

    KIND: ClassVar[str] = "phase"
    name: str
    done: int = 0
    total: int = 0
    waiting: list[list[str]] = field(default_factory=list)
    detail: str = ""
    seconds: float = 0.0
    ended: bool = False
    failed: bool = False
    nodes: dict[str, float] = field(default_factory=dict)
    parts: dict[str, tuple[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChanged:
    """The link to a node changed. `link` is connected, unreachable (since `seconds`), or lost for this attempt.

    Attributes:
        rebooted: The machine has rebooted, so no process of the attempt can run on it.
        lost_in: Seconds until the node counts as lost, if it stays unreachable; `None` for never.
        stop_in: Seconds until the node stops its workers by itself; `None` for never.
    """

    KIND: ClassVar[str] = "link"
    node: str
    link: str
    why: str = ""
    seconds: float = 0.0
    rebooted: bool = False
    lost_in: float | None = None
    stop_in: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockEstimated:
    """The head's clock equals the node's monotonic clock plus `offset`. The error is at most `error` seconds.

    The offset holds until the node reboots. `ahead` is the number of seconds by which the node's wall clock is ahead of
    the head's.
    """

    KIND: ClassVar[str] = "clock"
    node: str
    offset: float
    error: float
    boot: str = ""
    ahead: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TouchedNodes:
    """From now on these nodes may hold files of the run, even if no attempt begins on them."""

    KIND: ClassVar[str] = "traces"
    nodes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted:
    """A new attempt begins; `nodes` holds `{node, node_rank, address, ranks}` in order of node rank.

    `resume_from` is the checkpoint from which the workers resume, and `resume_from_time` the time of its newest file on
    the clock of its node, if it is the newest checkpoint. `newest_checkpoint` names the newest checkpoint and
    its version.
    """

    KIND: ClassVar[str] = "attempt"
    attempt: int
    world_size: int
    master_addr: str | None
    master_port: int | None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""
    resume_from: str | None = None
    resume_from_time: float | None = None
    newest_checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepSeen:
    """A rank has made the first step of the attempt, `ago_s` before this event.

    `step` is the number of this step, if the job reports or prints numbers. A second event adds a number that was
    unknown before.
    """

    KIND: ClassVar[str] = "first_step"
    attempt: int
    step: float | None = None
    ago_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEndDecided:
    """The controller ends the attempt on all nodes. `reason` is a `StopReason`."""

    KIND: ClassVar[str] = "decided"
    attempt: int
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPlanned:
    """Attempt `attempt` will begin at `at` (head's clock) on `nodes`, in order of node rank.

    Attributes:
        ended: The failure signature of the previous attempt: a text that is equal for equal failures.
        newest_checkpoint: The newest checkpoint when the previous attempt began.
        cause: The first observed failure of the previous attempt, as `cause_to_json` returns it.
        step: The last step of the slowest rank of the previous attempt.
        own_step: The same step by the job's own count, if the job reports or prints numbers.
        number: The number of this restart, if only restarts that count against `restart.max_restarts` are numbered.
        budget: The maximum of `number`, which is `restart.max_restarts`.
    """

    KIND: ClassVar[str] = "restarting"
    attempt: int
    why: str
    at: float
    nodes: list[str] = field(default_factory=list)
    ended: str = ""
    newest_checkpoint: str | None = None
    cause: dict[str, Any] | None = None
    step: int | None = None
    own_step: float | None = None
    number: int = 0
    budget: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallChanged:
    """A stall begins, changes or ends. `phase` is none, suspected or confirmed; `evidence` is a folder of the run."""

    KIND: ClassVar[str] = "stall"
    attempt: int
    phase: str
    since_s: float = 0.0
    limit_s: float = 0.0
    reason: str = ""
    evidence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleChanged:
    """No GPU of the run has done anything for `idle_s`; or a GPU works again, and `idle_s` is 0."""

    KIND: ClassVar[str] = "idle"
    attempt: int
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged:
    """A health problem of a node begins or is over.

    Attributes:
        check: The check that finds the problem before a run.
        key: `check`, with a suffix if the check finds several problems (`host.disk /`). Node, GPU and `key` together
            identify the problem.
        status: FAIL or WARN; PASS if the problem is over.
        message: A sentence that names the node and the GPU.
        action: The advice to a person (`health.findings.Action`).
        lasted_s: For how many seconds the problem has lasted.
    """

    KIND: ClassVar[str] = "health"
    node: str
    gpu: int | None
    check: str
    key: str
    status: str
    message: str
    action: str = "NONE"
    lasted_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for people: a warning, or a reason for waiting."""

    KIND: ClassVar[str] = "note"
    text: str
    level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """The start failed; nothing is running.

    `error` holds `{class, message, hint, exit_code}`. An error of several nodes also holds `nodes: [{node, message,
    hint}]`. An error of checks also holds `findings`.
    """

    KIND: ClassVar[str] = "start_failed"
    error: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsFetched:
    """The files of `results` that were fetched from the nodes at the end.

    Attributes:
        to: The folder on the head. It contains a folder for each node.
        files: How many files were fetched.
        bytes: The size of these files in bytes.
        missing: One sentence for each reason why files are missing.
    """

    KIND: ClassVar[str] = "results"
    to: str
    files: int = 0
    bytes: int = 0
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run is over, with its exit code. `remaining` holds `{node, pid, start_time, command, why}`."""

    KIND: ClassVar[str] = "ended"
    state: str
    exit_code: int
    remaining: list[RemainingProcess] = field(default_factory=list)


ControllerEvent = (
    RunCreated
    | StartStepProgress
    | LinkChanged
    | ClockEstimated
    | TouchedNodes
    | AttemptStarted
    | FirstStepSeen
    | AttemptEndDecided
    | RestartPlanned
    | StallChanged
    | IdleChanged
    | HealthChanged
    | Note
    | StartFailed
    | ResultsFetched
    | RunEnded
)
_KINDS: dict[str, type[Any]] = {event_type.KIND: event_type for event_type in get_args(ControllerEvent)}


def encode(seq: int, time: float, event: ControllerEvent) -> str:
    """Return the line of the controller's journal; `time` is the head's wall clock in seconds."""
    return json.dumps({"seq": seq, "time": time, "kind": event.KIND, **asdict(event)}, separators=(",", ":"))


def decode(line: str | bytes) -> tuple[int, float, ControllerEvent] | None:
    """Return sequence number, time and event of a line; `None` for an event of a newer controller.

    Raises:
        FrameError: The line is incomplete or invalid.
    """
    try:
        record = json.loads(line)
        seq, time, kind = record["seq"], record["time"], record["kind"]
        if type(seq) is not int or not isinstance(time, (int, float)):
            raise TypeError("seq and time are numbers")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FrameError(f"not an event: {line[:80]!r}") from error
    event_type = _KINDS.get(kind) if isinstance(kind, str) else None
    return None if event_type is None else (seq, time, parse_dataclass(event_type, record))


def build_start_failed(error: ClusterctlError) -> StartFailed:
    """Return the event of a failed start."""
    reason: dict[str, Any] = {
        "class": type(error).__name__,
        "message": str(error),
        "hint": error.hint,
        "exit_code": int(error.exit_code),
        "node": getattr(error, "node", None),
    }
    if isinstance(error, NodesError):
        reason["nodes"] = [
            {"node": e.node, "message": str(e), "hint": e.hint, "class": type(e).__name__} for e in error.errors
        ]
    if isinstance(error, UnhealthyError):
        reason["findings"] = [f.to_json() for f in error.findings]
    return StartFailed(error=reason)
