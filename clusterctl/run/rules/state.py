"""What is known about a run: a fold over the journals of its nodes and of its controller. No I/O, no clock.

Run states: starting running stalled restarting stopping, then succeeded failed cancelled lost.
Worker states: pending starting running exited lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from typing_extensions import assert_never

from clusterctl.agent.protocol import events, requests
from clusterctl.run.rules import events as head
from clusterctl.run.rules.blame import Cause, Exit, Verdict, first_failure, verdict

if TYPE_CHECKING:
    from collections.abc import Iterable


class RunPhase(str, Enum):
    """Where a run is in its life. The last five are final; `UNREADABLE` is what is said of files that say nothing."""

    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    UNREADABLE = "unreadable"

    @property
    def final(self) -> bool:
        """Nothing more will happen to the run, as far as can be read."""
        final = RunPhase.SUCCEEDED, RunPhase.FAILED, RunPhase.CANCELLED, RunPhase.LOST, RunPhase.UNREADABLE
        return self in final


class WorkerPhase(str, Enum):
    """Where a worker is in its life, in the current attempt."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"


class NodePhase(str, Enum):
    """What a node does for the current attempt, or that nobody knows."""

    WAITING = "waiting"
    PREPARED = "prepared"
    RUNNING = "running"
    STOPPING = "stopping"
    SWEPT = "swept"
    UNREACHABLE = "unreachable"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One rank in the current attempt.

    Attributes:
        start_time: In clock ticks since the boot of its node.
        stopped: We asked for its end.
        tail: The end of its output, where it did not end well.
        verdict: What its end says for itself; `None` before it, and where we asked for it.
    """

    rank: int
    local_rank: int
    node: str
    phase: WorkerPhase = WorkerPhase.PENDING
    pid: int | None = None
    start_time: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    stopped: bool = False
    oom: str | None = None
    tail: str = ""
    verdict: Verdict | None = None

    @property
    def failed(self) -> bool:
        """It ended by itself, and not well. An exit that nobody saw counts."""
        return self.phase is WorkerPhase.EXITED and not self.stopped and self.exit_code != 0

    @property
    def unseen(self) -> bool:
        """Nobody saw how it ended."""
        return self.exit_code is None and self.signal is None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node in the current attempt.

    Attributes:
        link: connected, unreachable, lost; empty before the first connection.
        swept: Nothing of the current attempt is left there, or `remaining` is.
        stop_reason: Why the node stops or stopped its workers, or `None`.
        intruder: Who has taken a port of the workers', or `None`.
        held: Why GPU memory is not free after the attempt, or `None`.
        clock: Offset and error that put its monotonic clock on the head's line.
        ahead: Seconds by which its wall clock is ahead of the head's; 0 until that is known.
        boot: Boot id of its machine when it was prepared; "" where that is not known yet.
    """

    node: str
    node_rank: int
    address: str | None = None
    ranks: tuple[int, ...] = ()
    link: str = ""
    link_why: str = ""
    prepared: bool = False
    swept: bool = False
    finished: bool = False
    stop_reason: str | None = None
    remaining: tuple[dict[str, Any], ...] = ()
    intruder: str | None = None
    held: str | None = None
    clock: tuple[float, float] | None = None
    ahead: float = 0.0
    boot: str = ""
    seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallView:
    """What the stall rule says. `phase` is suspected or confirmed."""

    phase: str
    since_s: float
    limit_s: float
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything that is known about a run, from its journals alone.

    Attributes:
        reason: The `StopReason` for which the current attempt is being ended, or `None`.
        exit_code: Of the run itself, once it is over.
        no_exit: What is to blame where no exit of a worker is: a node that was lost, a start that failed.
        remaining: Processes that may still be there: `{node, pid, start_time, command, why}`.
        error: Why the start failed (`StartFailed.error`).
        troubles: What is wrong with nodes and GPUs now, by node, GPU and key.
        restarts: Head times at which attempts after the first began.
        retired: Nodes of earlier attempts that take part no more; what they still say moves their cursors.
        placed: Attempt, node and ranks of all that was ever started.
        traces: Nodes on which something of the run may lie, of all attempts and of starts that failed.
        newest: Which checkpoint was the newest when the current attempt began, and as it was then.
        unread: The first line of each file of the run that could not be read, and why.
        endings: How each attempt that was followed by another ended, and what was the newest checkpoint at its begin.
        next_nodes: Nodes of the attempt that a run in state restarting waits for, in order of node rank.
        restart_why: The word of `restart.on` for it.
    """

    run: str = ""
    name: str = ""
    path: str = ""
    phase: RunPhase = RunPhase.STARTING
    attempt: int = -1
    world_size: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    nodes: dict[str, NodeState] = field(default_factory=dict)
    workers: dict[int, WorkerState] = field(default_factory=dict)
    created: float | None = None
    running_since: float | None = None
    ended: float | None = None
    reason: str | None = None
    reason_text: str = ""
    exit_code: int | None = None
    no_exit: Cause | None = None
    stall: StallView | None = None
    remaining: tuple[dict[str, Any], ...] = ()
    error: dict[str, Any] | None = None
    troubles: dict[tuple[str, int | None, str], head.Health] = field(default_factory=dict)
    restarts: tuple[float, ...] = ()
    restart_at: float | None = None
    restart_why: str = ""
    next_nodes: tuple[str, ...] = ()
    retired: dict[str, NodeState] = field(default_factory=dict)
    placed: tuple[tuple[int, str, tuple[int, ...]], ...] = ()
    traces: tuple[str, ...] = ()
    newest: str | None = None
    endings: tuple[tuple[str, str | None], ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """The run has ended."""
        return self.phase.final

    @property
    def causes(self) -> tuple[Cause, ...]:
        """What is to blame, the first observed failure on top; worked out whenever it is asked for.

        Where no rank failed and the others were stopped all the same, a rank that ended well too early is to blame.
        """
        ended = [w for w in self.workers.values() if w.verdict is not None and not self._lost_with_node(w)]
        early = ended if self.reason == requests.StopReason.PEER_FAILED.value else []
        verdicts = [w.verdict for w in [w for w in ended if w.failed] or early if w.verdict is not None]
        if verdicts:
            return first_failure(verdicts)
        return () if self.no_exit is None else (self.no_exit,)

    @property
    def cause(self) -> Cause | None:
        """The first observed failure."""
        return next(iter(self.causes), None)

    def _lost_with_node(self, worker: WorkerState) -> bool:
        """Return whether nobody saw a worker's end because its machine went down with it: that is what is to blame."""
        return worker.unseen and self.nodes[worker.node].link == "lost"

    def unfinished_nodes(self) -> list[str]:
        """Return the nodes on which a rank has not ended."""
        return list({w.node: None for w in self.workers.values() if w.phase is not WorkerPhase.EXITED})

    def ahead(self, node: str) -> float:
        """Return by how many seconds the wall clock of a node is ahead of the head's; 0 where that is not known."""
        known = self.nodes.get(node) or self.retired.get(node)
        return 0.0 if known is None else known.ahead

    def node_phase(self, node: str) -> NodePhase:
        """Return what a node is doing, in one word."""
        state = self.nodes[node]
        workers = [self.workers[r] for r in state.ranks if r in self.workers]
        if state.link == "lost":
            return NodePhase.LOST
        if state.swept:
            return NodePhase.SWEPT
        if state.link == "unreachable":
            return NodePhase.UNREACHABLE
        if state.stop_reason:
            return NodePhase.STOPPING
        if any(w.phase is not WorkerPhase.PENDING for w in workers):
            return NodePhase.RUNNING
        return NodePhase.PREPARED if state.prepared else NodePhase.WAITING


def apply_node(state: RunState, node: str, stamp: events.Stamp, event: events.Event) -> RunState:
    """Return `state` after an event of a node's journal, or `state` itself where it was seen before.

    Events of earlier attempts only move the cursor: their part is over.
    """
    if node in state.retired:
        return _apply_retired(state, state.retired[node], stamp, event)
    seen = state.nodes.get(node)
    if seen is None or stamp.seq <= seen.seq:
        return state
    state = _with_node(state, replace(seen, seq=stamp.seq))
    attempt = getattr(event, "attempt", state.attempt)
    if attempt != state.attempt:
        return state
    return _apply_current(state, state.nodes[node], stamp, event)


def _apply_retired(state: RunState, node: NodeState, stamp: events.Stamp, event: events.Event) -> RunState:
    if stamp.seq <= node.seq:
        return state
    node = replace(node, seq=stamp.seq)
    if isinstance(event, events.Swept):
        node = replace(node, swept=True, remaining=_remaining(node, event))
    elif isinstance(event, events.Finished):
        node = replace(node, finished=True)
    return replace(state, retired={**state.retired, node.node: node})


def _remaining(node: NodeState, event: events.Swept) -> tuple[dict[str, Any], ...]:
    return tuple({"node": node.node, **r} for r in event.remaining)


def _apply_current(state: RunState, node: NodeState, stamp: events.Stamp, event: events.Event) -> RunState:
    match event:
        case events.Prepared():
            return _with_node(state, replace(node, prepared=True, boot=stamp.boot))
        case events.Started():
            return _started(state, node, event)
        case events.Exited():
            return _exited(state, node, event)
        case events.Stopping():
            return _with_node(state, replace(node, stop_reason=event.reason))
        case events.Swept():
            return _with_node(state, replace(node, swept=True, remaining=_remaining(node, event)))
        case events.Finished():
            return _with_node(state, replace(node, finished=True))
        case events.Alarm() if event.code == events.GPU_MEMORY:
            where = f"GPU {event.gpu}: " if event.gpu is not None else ""
            return _with_node(state, replace(node, held=f"{where}{event.message}"))
        case events.Alarm() if event.code == events.PORT_TAKEN:
            return _with_node(state, replace(node, intruder=event.message))
        case events.Adopted() | events.Alarm() | events.Dropped():
            return state
        case _:
            assert_never(event)


def _started(state: RunState, node: NodeState, event: events.Started) -> RunState:
    worker = state.workers.get(event.rank)
    if worker is None or worker.phase is WorkerPhase.EXITED or worker.node != node.node:
        return state
    worker = replace(worker, phase=WorkerPhase.RUNNING, pid=event.pid, start_time=event.start_time)
    state = _with_worker(state, worker)
    pending = (WorkerPhase.PENDING, WorkerPhase.STARTING)
    if state.phase is RunPhase.STARTING and not any(w.phase in pending for w in state.workers.values()):
        stalled = state.stall is not None and state.stall.phase == "confirmed"
        return replace(state, phase=RunPhase.STALLED if stalled else RunPhase.RUNNING)
    return state


def _exited(state: RunState, node: NodeState, event: events.Exited) -> RunState:
    worker = state.workers.get(event.rank)
    # A node knows of its own ranks alone.
    if worker is None or worker.node != node.node:
        return state
    worker = replace(
        worker,
        phase=WorkerPhase.EXITED,
        exit_code=event.exit_code,
        signal=event.signal,
        stopped=event.stopped,
        oom=event.oom,
        tail=event.tail,
        verdict=None if event.stopped else verdict(_exit_of(node, event)),
    )
    return _with_worker(state, worker)


def _exit_of(node: NodeState, event: events.Exited) -> Exit:
    offset, error = node.clock or (0.0, float("inf"))
    return Exit(
        rank=event.rank,
        node=node.node,
        exit_code=event.exit_code,
        signal=event.signal,
        oom=event.oom,
        error=event.error,
        tail=event.tail,
        earliest=event.earliest + offset - error,
        latest=event.latest + offset + error,
    )


def apply_head(state: RunState, time: float, event: head.ControllerEvent) -> RunState:
    """Return `state` after an event of the controller's journal; `time` is when it was written (head, seconds)."""
    match event:
        case head.Created():
            return replace(state, run=event.run, name=event.name, path=event.path, created=time)
        case head.Link():
            return _link(state, event)
        case head.Clock():
            return _clock(state, event)
        case head.Traces():
            return replace(state, traces=_joined(state.traces, event.nodes))
        case head.Attempt():
            return _attempt(state, time, event)
        case head.Decided():
            if event.attempt != state.attempt or state.reason is not None:
                return state
            return replace(state, phase=RunPhase.STOPPING, reason=event.reason, reason_text=event.message)
        case head.Restarting():
            return replace(
                state,
                phase=RunPhase.RESTARTING,
                restart_at=event.at,
                restart_why=event.why,
                next_nodes=tuple(event.nodes),
                endings=(*state.endings, (event.ended, event.newest)),
            )
        case head.StallSeen():
            return _stall(state, time, event)
        case head.StartFailed():
            return replace(state, error=event.error, no_exit=_start_cause(event.error))
        case head.Ended():
            phase = RunPhase(event.state)
            return replace(state, phase=phase, exit_code=event.exit_code, ended=time, remaining=tuple(event.remaining))
        case head.Health():
            return _health(state, event)
        case head.Phase() | head.Note():
            return state
        case _:
            assert_never(event)


def _start_cause(error: dict[str, Any]) -> Cause:
    return Cause(kind="start_failed", node=error.get("node"), message=str(error.get("message", "")), certain=True)


def _clock(state: RunState, event: head.Clock) -> RunState:
    node = state.nodes.get(event.node)
    if node is None:
        return state
    return _with_node(state, replace(node, clock=(event.offset, event.error), ahead=event.ahead))


def _link(state: RunState, event: head.Link) -> RunState:
    node = state.nodes.get(event.node)
    if node is None:
        return state
    swept = node.swept or event.rebooted
    state = _with_node(state, replace(node, link=event.link, link_why=event.why, swept=swept))
    if event.link != "lost":
        return state
    left = [r for r in node.ranks if state.workers[r].phase is not WorkerPhase.EXITED]
    unseen = [r for r in node.ranks if state.workers[r].phase is WorkerPhase.EXITED and state.workers[r].unseen]
    lost = {r: replace(state.workers[r], phase=WorkerPhase.LOST) for r in left}
    state = replace(state, workers={**state.workers, **lost})
    if state.no_exit is not None or not (left or unseen):
        return state
    message = f"node lost: {event.why or 'no answer'}"
    cause = Cause(kind="node_lost", node=event.node, rank=min(left or unseen), message=message, certain=True)
    return replace(state, no_exit=cause)


def _attempt(state: RunState, time: float, event: head.Attempt) -> RunState:
    nodes: dict[str, NodeState] = {}
    workers: dict[int, WorkerState] = {}
    placed = list(state.placed)
    before = {**state.retired, **state.nodes}
    for entry in event.nodes:
        name, ranks = entry["node"], tuple(entry["ranks"])
        old = before.get(name)
        fresh = NodeState(node=name, node_rank=entry["node_rank"], address=entry.get("address"), ranks=ranks)
        if old is not None:
            fresh = replace(fresh, link=old.link, clock=old.clock, ahead=old.ahead, seq=old.seq)
        nodes[name] = fresh
        placed.append((event.attempt, name, ranks))
        workers |= {r: WorkerState(rank=r, local_rank=i, node=name) for i, r in enumerate(ranks)}
    return replace(
        state,
        attempt=event.attempt,
        phase=RunPhase.STARTING,
        world_size=event.world_size,
        master_addr=event.master_addr,
        master_port=event.master_port,
        nodes=nodes,
        workers=workers,
        running_since=time,
        reason=None,
        reason_text="",
        no_exit=None,
        stall=None,
        troubles={key: event for key, event in state.troubles.items() if event.node in nodes},
        restart_at=None,
        restart_why="",
        next_nodes=(),
        retired={name: node for name, node in before.items() if name not in nodes},
        placed=tuple(placed),
        traces=_joined(state.traces, nodes),
        newest=event.newest,
        restarts=(*state.restarts, time) if event.attempt > 0 else state.restarts,
    )


def _joined(before: tuple[str, ...], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*before, *more]))


def _stall(state: RunState, time: float, event: head.StallSeen) -> RunState:
    if event.attempt != state.attempt:
        return state
    if event.phase == "none":
        phase = RunPhase.RUNNING if state.phase is RunPhase.STALLED else state.phase
        return replace(state, stall=None, phase=phase)
    stall = StallView(
        phase=event.phase,
        since_s=event.since_s,
        limit_s=event.limit_s,
        reason=event.reason,
        at=time,
    )
    if state.phase in (RunPhase.RUNNING, RunPhase.STALLED):
        state = replace(state, phase=RunPhase.STALLED if event.phase == "confirmed" else RunPhase.RUNNING)
    return replace(state, stall=stall)


def _health(state: RunState, event: head.Health) -> RunState:
    key = (event.node, event.gpu, event.key)
    others = {k: v for k, v in state.troubles.items() if k != key}
    return replace(state, troubles=others if event.status == "PASS" else {**others, key: event})


def _with_node(state: RunState, node: NodeState) -> RunState:
    return replace(state, nodes={**state.nodes, node.node: node})


def _with_worker(state: RunState, worker: WorkerState) -> RunState:
    return replace(state, workers={**state.workers, worker.rank: worker})
