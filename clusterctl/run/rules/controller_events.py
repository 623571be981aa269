"""What the controller writes into its own journal: what it did, saw of the links, and decided. Values only.

An error that ended a start, as the controller's journal keeps it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, get_args

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.record_types import RemainingProcess
from clusterctl.agent.protocol.requests import parse_dataclass
from clusterctl.errors import ClusterctlError, NodesError, UnhealthyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """The run exists. Written once, before anything else."""

    KIND: ClassVar[str] = "created"
    run: str
    name: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How far a step of the start is.

    Attributes:
        name: connect, health, sync, resume, prepare, start.
        done: Nodes (for `start`: workers) that are through.
        total: How many there are.
        waiting: `[node, what it waits for]`, slowest first.
        detail: What a person wants to know of the finished step.
        seconds: Since the step began.
        ended: The step is over.
        failed: It is over because it failed.
        nodes: Once it is over: seconds from its beginning until each node was through.
        parts: What a node spent most of them with, and for how long, where it was waited for several things.
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
class Link:
    """The connection to a node changed: connected, unreachable (since `seconds`), or lost for this attempt.

    Attributes:
        rebooted: The machine has started anew since, so nothing of the attempt can be running there.
        lost_in: Seconds after which it is given up if it stays unreachable; `None` where it never is.
        stop_in: Seconds after which it stops its workers by itself; `None` where they go on.
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
class Clock:
    """Head time is the node's monotonic clock plus `offset`, give or take `error` (seconds), in this boot.

    `ahead` is by how many seconds the node's wall clock is ahead of the head's, which both may be set at any time.
    """

    KIND: ClassVar[str] = "clock"
    node: str
    offset: float
    error: float
    boot: str = ""
    ahead: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TouchedNodes:
    """From now on something of the run may lie on these nodes, whether or not an attempt comes to begin there."""

    KIND: ClassVar[str] = "traces"
    nodes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A new attempt begins; `nodes` holds `{node, node_rank, address, ranks}` in order of node rank.

    `resume_from` is the checkpoint that its workers are told to go on from; `newest` names the newest that there was
    then, in words that differ once it is written anew.
    """

    KIND: ClassVar[str] = "attempt"
    attempt: int
    world_size: int
    master_addr: str | None
    master_port: int | None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""
    resume_from: str | None = None
    newest_checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndDecided:
    """The attempt is being ended everywhere, for this `StopReason`."""

    KIND: ClassVar[str] = "decided"
    attempt: int
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarting:
    """Attempt `attempt` will begin at `at` (head's clock) on `nodes`, in order of node rank.

    Attributes:
        ended: How the attempt before it ended, in words that are equal for attempts that end alike.
        newest: What was the newest checkpoint when that one began.
        cause: Why that one ended: the first observed failure, as `rules.ended_attempts.cause_record` gives it.
        step: Which step its slowest rank had reached.
        number: Which restart this is of those that count.
        budget: How many may count.
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
    number: int = 0
    budget: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallChanged:
    """The stall rule's view changed. `phase` is none, suspected or confirmed; `evidence` is a folder of the run."""

    KIND: ClassVar[str] = "stall"
    attempt: int
    phase: str
    since_s: float = 0.0
    limit_s: float = 0.0
    reason: str = ""
    evidence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Trouble of a node began or is over, as its samples tell; told once.

    Attributes:
        check: The check that would find it before a run.
        key: `check`, finer where one check finds several things (`host.disk /`); with node and GPU it names a trouble.
        status: FAIL or WARN, PASS when it is over.
        message: Names the node and the GPU.
        action: What a person should do (`health.model.Action`).
        lasted_s: For how long it has been so.
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
    """A line for people: a warning, or what the controller waits for."""

    KIND: ClassVar[str] = "note"
    text: str
    level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """The start ended with an error of ours; nothing is left running.

    `error` holds `{class, message, hint, exit_code}`, and for several nodes `nodes: [{node, message, hint}]`, or for
    checks `findings`.
    """

    KIND: ClassVar[str] = "start_failed"
    error: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What came of `results` from the nodes at the end.

    Attributes:
        to: Folder on the head, with one a node in it.
        files: How many came.
        bytes: Of all of them.
        lacking: Why something did not come, a sentence each.
    """

    KIND: ClassVar[str] = "results"
    to: str
    files: int = 0
    bytes: int = 0
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run is over. `remaining` holds `{node, pid, start_time, command, why}`; `code` is the run's own exit code."""

    KIND: ClassVar[str] = "ended"
    state: str
    exit_code: int
    remaining: list[RemainingProcess] = field(default_factory=list)


ControllerEvent = (
    Created
    | Phase
    | Link
    | Clock
    | TouchedNodes
    | Attempt
    | EndDecided
    | Restarting
    | StallChanged
    | Health
    | Note
    | StartFailed
    | Results
    | Ended
)
_KINDS: dict[str, type[Any]] = {event_type.KIND: event_type for event_type in get_args(ControllerEvent)}


def encode(seq: int, time: float, event: ControllerEvent) -> str:
    """Return the line of the controller's journal; `time` is the head's wall clock in seconds."""
    return json.dumps({"seq": seq, "time": time, "kind": event.KIND, **asdict(event)}, separators=(",", ":"))


def decode(line: str | bytes) -> tuple[int, float, ControllerEvent] | None:
    """Return what a line says, or `None` for a kind that a newer controller wrote.

    Raises:
        FrameError: The line is torn.
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
    """Return the event that says why a start has failed."""
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
