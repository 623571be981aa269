"""The state of a run. `state_updates` builds the state from the journals of controller and nodes. Pure.

A run is waiting (for GPUs), starting, running, stalled, restarting or stopping, and at the end succeeded, failed,
cancelled or lost. A worker is pending, starting, running, exited or lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from clusterctl.agent.protocol.events import Exited
from clusterctl.agent.protocol.record_types import LeftoverProcess, RemainingProcess
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.formatting import describe_duration
from clusterctl.run.rules import controller_events as head
from clusterctl.run.rules.failure_causes import (
    BACKGROUND_MAX_S,
    Cause,
    ExitAnalysis,
    build_left_work_cause,
    find_early_exit,
    find_errors_before_stop,
    is_waiting_program,
    sort_causes,
)

_JSON_FIELDS = ("kind", "node", "rank", "exit_code", "signal", "message", "certain")
_MAX_MESSAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """The moments of an attempt that `goodput` needs, on the head's wall clock, and the steps of the job's own count.

    Attributes:
        started: The time at which all workers had been started.
        first_step_at: The time of the first step of any rank.
        first_step: The number of the first step, if the job reports or prints numbers of steps.
        last_step: The last number of the slowest rank, once another attempt is planned.
        resumed_from_at: The time of the checkpoint from which the attempt resumed, on the clock of its node.
        stalls: Begin and end of each stall, and of the silence before a node was lost; `None` while it lasts.
        decided: The time at which the controller decided to end the attempt.
    """

    started: float | None = None
    first_step_at: float | None = None
    first_step: float | None = None
    last_step: float | None = None
    resumed_from_at: float | None = None
    stalls: tuple[tuple[float, float | None], ...] = ()
    decided: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierAttempt:
    """An attempt before the current attempt. Times are on the head's clock.

    Attributes:
        why: The kind of the attempt's end, as a word of `restart.on`.
        cause: The first observed failure, without its traceback.
        step: The last step of the slowest rank.
        resume_from: The checkpoint from which the attempt resumed.
        times: The moments of the attempt, for its goodput.
    """

    number: int
    began: float | None
    ended: float
    why: str = ""
    cause: Cause | None = None
    step: int | None = None
    resume_from: str | None = None
    times: AttemptTimes = field(default_factory=AttemptTimes)


def cause_to_json(cause: Cause | None) -> dict[str, Any] | None:
    """Return a cause for the journal. The traceback is left out, because the output of the attempt contains it."""
    if cause is None:
        return None
    return {key: getattr(replace(cause, message=cause.message[:_MAX_MESSAGE]), key) for key in _JSON_FIELDS}


def cause_from_json(record: dict[str, Any] | None) -> Cause | None:
    """Return a cause from the journal. Fields of a newer controller are ignored."""
    return None if record is None else Cause(**{key: record[key] for key in _JSON_FIELDS if key in record})


class RunPhase(str, Enum):
    """The phase of a run. The last five phases are final. `UNREADABLE` means that its files cannot be read."""

    WAITING = "waiting"
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
    def is_final(self) -> bool:
        """Whether the run is over."""
        final = RunPhase.SUCCEEDED, RunPhase.FAILED, RunPhase.CANCELLED, RunPhase.LOST, RunPhase.UNREADABLE
        return self in final


class WorkerPhase(str, Enum):
    """The phase of a worker in the current attempt."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"


_PENDING = (WorkerPhase.PENDING, WorkerPhase.STARTING)


class NodePhase(str, Enum):
    """The phase of a node in the current attempt."""

    WAITING = "waiting"
    PREPARED = "prepared"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"
    UNREACHABLE = "unreachable"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One rank in the current attempt.

    Attributes:
        start_time: Start of the process in clock ticks since the boot of its node.
        stopped: The controller stopped the rank.
        tail: The end of the output. After a stop, `tail` is set only if the rank had printed a traceback before.
        swallowed_exception: Exception and line of the traceback at the end of the output of a rank that ended with 0;
            else "".
        cause_before_stop: The error that the rank had printed before the controller stopped it.
        began_s: Start of the rank on the monotonic clock of its node.
        lasted_s: How long the first process of the rank ran, once the rank has ended.
        has_failed_inside: The Python of the rank failed, although its first process ended with 0.
        exited: The exit event from the node.
        exit_analysis: The analysis of the exit; `None` before the exit, and if the controller stopped the rank.
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
    tail: str = ""
    swallowed_exception: str = ""
    cause_before_stop: Cause | None = None
    began_s: float | None = None
    lasted_s: float | None = None
    has_failed_inside: bool = False
    exited: Exited | None = None
    exit_analysis: ExitAnalysis | None = None

    @property
    def failed(self) -> bool:
        """Whether the rank ended by itself with an error. A lost exit status counts as an error."""
        bad = self.exit_code != 0 or self.has_failed_inside
        return self.phase is WorkerPhase.EXITED and not self.stopped and bad

    @property
    def ended_well(self) -> bool:
        """Whether the rank ended by itself with 0, and its Python did not fail."""
        return self.phase is WorkerPhase.EXITED and not self.stopped and not self.failed

    @property
    def is_exit_unknown(self) -> bool:
        """Whether the exit status of the rank was lost."""
        return self.exit_code is None and self.signal is None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node in the current attempt.

    Attributes:
        link: The state of the link: connected, unreachable or lost; empty before the first connection.
        silent_since: The time at which the node was last heard, on the head's wall clock, while it is unreachable.
        swept: The node has ended all processes of the attempt, except those in `remaining`.
        stop_reason: The reason why the node stops or stopped its workers, or `None`.
        remaining: Processes that the node could not end.
        group: The ranks that the node's workers have in their process group, and the size of this group.
        leftovers: Processes that still worked after all ranks had ended well; the node ended them.
        past_grace: Processes that did not end within the grace of a stop; the node killed them.
        grace_s: The grace of the last stop.
        port_conflict: A description of the other process that uses a port of the workers, or `None`.
        gpu_memory_held: The reason why GPU memory is not free after the attempt, or `None`.
        clock: The offset of the head's clock from the node's monotonic clock, and the error of this offset, in seconds.
        clock_ahead_s: Seconds by which the wall clock of the node is ahead of the head's; 0 if unknown.
        boot: Boot id of the machine when the node was prepared; "" before the node is prepared.
        python: Path of the workers' interpreter; "" before the node is prepared.
        image: Image of the workers' container; "" without a container.
        seq: Sequence number of the last applied event.
        role: The role of the node in `job.roles`; "" without roles.
        is_service: Whether another role needs the role of the node, so the run does not wait for its end.
    """

    node: str
    node_rank: int
    address: str | None = None
    ranks: tuple[int, ...] = ()
    role: str = ""
    is_service: bool = False
    link: str = ""
    link_why: str = ""
    silent_since: float | None = None
    prepared: bool = False
    swept: bool = False
    finished: bool = False
    stop_reason: str | None = None
    remaining: tuple[RemainingProcess, ...] = ()
    group: tuple[tuple[int, ...], int] | None = None
    leftovers: tuple[LeftoverProcess, ...] = ()
    past_grace: tuple[LeftoverProcess, ...] = ()
    grace_s: float = 0.0
    port_conflict: str | None = None
    gpu_memory_held: str | None = None
    clock: tuple[float, float] | None = None
    clock_ahead_s: float = 0.0
    boot: str = ""
    python: str = ""
    image: str = ""
    seq: int = 0

    @property
    def label(self) -> str:
        """The name of the node, with its role if it has one."""
        return f"{self.node} ({self.role})" if self.role else self.node

    def describe_silence(self, seconds: float | None = None) -> str:
        """Return "no answer" with the duration, and the reason for the broken connection if the reason is known."""
        time = "" if seconds is None or seconds < 1 else f" for {describe_duration(seconds)}"
        silent = not self.link_why or self.link_why == "no answer" or "no sign of life" in self.link_why
        return f"no answer{time}" + ("" if silent else f" ({self.link_why.removeprefix(f'{self.node}: ')})")


class MutableNodes(dict[str, NodeState]):
    """The nodes of a state while `StateBuilder` builds it. Events change this table in place."""


class MutableWorkers(dict[int, WorkerState]):
    """The workers of a state while `StateBuilder` builds it. The table counts the workers that were not started yet."""

    def __init__(self, workers: Mapping[int, WorkerState]) -> None:
        super().__init__(workers)
        self.pending_count = sum(w.phase in _PENDING for w in workers.values())

    def put(self, worker: WorkerState) -> None:
        """Store a new state of a worker."""
        self.pending_count += (worker.phase in _PENDING) - (self[worker.rank].phase in _PENDING)
        self[worker.rank] = worker

    @classmethod
    def has_pending(cls, workers: Mapping[int, WorkerState]) -> bool:
        """Return whether any worker was not started yet. `workers` may be this class or any other mapping."""
        if isinstance(workers, cls):
            return workers.pending_count > 0
        return any(w.phase in _PENDING for w in workers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StallState:
    """A stall of the run. `phase` is suspected or confirmed; `evidence` is a folder of the run.

    Attributes:
        at: The time (head's wall clock) at which `since_s` was measured.
        until: The time at which the stall ended; `None` while the stall lasts.
    """

    phase: str
    since_s: float
    limit_s: float
    reason: str
    at: float
    evidence: str | None = None
    until: float | None = None

    def at_time(self, now: float) -> StallState:
        """Return the stall at a later moment on the head's wall clock, with its present length."""
        return replace(self, since_s=self.since_s + max(0.0, now - self.at))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run, built from its journals alone.

    Attributes:
        reason: The `StopReason` of the current attempt; `None` before the attempt is stopped.
        exit_code: The exit code of the run, once it is over.
        external_cause: A cause that is no exit of a worker: a lost node, or a failed start.
        stall: The present stall, or `None`.
        last_stall: The last stall of the current attempt that has ended.
        idle_since: The time (head's wall clock) since which no GPU of the run has done anything, if it is idle.
        remaining: Processes that may still run: `{node, pid, start_time, command, why}`.
        error: The error of a failed start (`StartFailed.error`).
        troubles: Present health problems, by node, GPU and key.
        restarts: The time (head's clock) at which each attempt after the first began.
        restart_why: The kind of end that causes the next attempt, as a word of `restart.on`.
        next_nodes: The nodes of the next attempt in order of node rank, while the run restarts.
        retired: Nodes that took part in earlier attempts only.
        placements: An item for each node of each attempt: the attempt, the node and its ranks.
        touched_nodes: Nodes that may hold files of the run, including nodes of earlier attempts and of failed starts.
        newest_checkpoint: The newest checkpoint and its version when the current attempt began.
        failure_signatures: For each earlier attempt: its failure signature, and the newest checkpoint when it began.
        resume_from: The checkpoint from which the current attempt resumed.
        times: The moments of the current attempt, for its goodput.
        earlier_attempts: The attempts before the current one.
        unreadable_lines: The first unreadable line of each file of the run, with the reason.
        results: The files that were fetched at the end, or `None`.
        waits_for: What a waiting run waits for, one text for each node.
        waited_until: When the run had its GPUs, on the head's wall clock; `None` if it did not wait.
    """

    run: str = ""
    name: str = ""
    path: str = ""
    phase: RunPhase = RunPhase.STARTING
    waits_for: tuple[str, ...] = ()
    waited_until: float | None = None
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
    external_cause: Cause | None = None
    stall: StallState | None = None
    last_stall: StallState | None = None
    idle_since: float | None = None
    remaining: tuple[RemainingProcess, ...] = ()
    error: dict[str, Any] | None = None
    troubles: dict[tuple[str, int | None, str], head.HealthChanged] = field(default_factory=dict)
    restarts: tuple[float, ...] = ()
    restart_at: float | None = None
    restart_why: str = ""
    next_nodes: tuple[str, ...] = ()
    retired: dict[str, NodeState] = field(default_factory=dict)
    placements: tuple[tuple[int, str, tuple[int, ...]], ...] = ()
    touched_nodes: tuple[str, ...] = ()
    newest_checkpoint: str | None = None
    failure_signatures: tuple[tuple[str, str | None], ...] = ()
    resume_from: str | None = None
    times: AttemptTimes = field(default_factory=AttemptTimes)
    earlier_attempts: tuple[EarlierAttempt, ...] = ()
    unreadable_lines: tuple[str, ...] = ()
    results: head.ResultsFetched | None = None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.phase.is_final

    @property
    def may_run(self) -> bool:
        """Whether processes of the run may exist: the run has not ended, or processes may have remained."""
        return not self.is_over or bool(self.remaining)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of the end; the first observed failure comes first. Computed at each access.

        A rank that ended with 0 too early is the cause if the other ranks were stopped and none failed, or if all
        failed ranks had lost the connection to this rank. Ranks that had printed an error before a stop come before
        ranks that only lost a peer.
        """
        if self.reason == StopReason.ROLES_DONE.value:
            return ()
        ended = [w for w in self.workers.values() if w.exit_analysis is not None and not self._lost_with_node(w)]
        failed = [w.exit_analysis for w in ended if w.failed and w.exit_analysis is not None]
        well = [w.exit_analysis for w in ended if not w.failed and w.exit_analysis is not None]
        if failed:
            addresses = {node.node: node.address for node in self.nodes.values()}
            early = find_early_exit(failed, well, addresses)
            own = self._failed_before_stop() if early is None else (early,)
            return (*own, *sort_causes(failed))
        if well and self.reason == StopReason.PEER_FAILED.value:
            return sort_causes(well)
        if self.has_left_work:
            at_work = [(n.node, one) for n in self.nodes.values() for one in n.leftovers if not is_waiting_program(one)]
            return tuple(build_left_work_cause(*each) for each in at_work)
        return () if self.external_cause is None else (self.external_cause,)

    @property
    def cause(self) -> Cause | None:
        """The first observed failure."""
        return next(iter(self.causes), None)

    @property
    def has_left_work(self) -> bool:
        """Whether all ranks ended with 0 within seconds and left working processes, which the nodes then ended."""
        workers = self.workers.values()
        is_at_work = any(not is_waiting_program(one) for node in self.nodes.values() for one in node.leftovers)
        return is_at_work and all(
            w.ended_well and w.lasted_s is not None and w.lasted_s < BACKGROUND_MAX_S for w in workers
        )

    def _failed_before_stop(self) -> tuple[Cause, ...]:
        workers = self.workers.values()
        stopped = [w.cause_before_stop for w in workers if w.cause_before_stop is not None]
        failed = [(w.exit_analysis, w.tail) for w in workers if w.failed and w.exit_analysis is not None]
        return find_errors_before_stop(stopped, failed) if stopped else ()

    def _lost_with_node(self, worker: WorkerState) -> bool:
        """Return whether the exit status of a worker was lost together with its node.

        If so, the loss of the node is the cause.
        """
        return worker.is_exit_unknown and self.nodes[worker.node].link == "lost"

    @property
    def main_workers(self) -> list[WorkerState]:
        """The workers for whose end the run waits: all workers without roles, else those that no other role needs."""
        return [worker for worker in self.workers.values() if not self.nodes[worker.node].is_service]

    def describe_node(self, node: str) -> str:
        """Return the name of a node, with its role if it has one."""
        state = self.nodes.get(node) or self.retired.get(node)
        return node if state is None else state.label

    @property
    def first_ranks(self) -> dict[str, int]:
        """The first rank of each role; of the whole run without roles."""
        firsts: dict[str, int] = {}
        for rank in sorted(self.workers):
            firsts.setdefault(self.nodes[self.workers[rank].node].role, rank)
        return firsts

    def label_cause(self, cause: Cause) -> Cause:
        """Return a cause whose node is the label of the node."""
        return cause if cause.node is None else replace(cause, node=self.describe_node(cause.node))

    def list_unfinished_nodes(self) -> list[str]:
        """Return the nodes with a rank that has not ended."""
        return list({w.node: None for w in self.main_workers if w.phase is not WorkerPhase.EXITED})

    def clock_ahead_s(self, node: str) -> float:
        """Return by how many seconds the wall clock of a node is ahead of the head's; 0 if unknown."""
        state = self.nodes.get(node) or self.retired.get(node)
        return 0.0 if state is None else state.clock_ahead_s

    def find_node_phase(self, node: str) -> NodePhase:
        """Return the phase of a node."""
        state = self.nodes[node]
        workers = [self.workers[r] for r in state.ranks if r in self.workers]
        if state.link == "lost":
            return NodePhase.LOST
        if state.swept:
            return NodePhase.ENDED
        if state.link == "unreachable":
            return NodePhase.UNREACHABLE
        if state.stop_reason:
            return NodePhase.STOPPING
        if any(w.phase is not WorkerPhase.PENDING for w in workers):
            return NodePhase.RUNNING
        return NodePhase.PREPARED if state.prepared else NodePhase.WAITING


Placement = tuple[int, str, tuple[int, ...]]


class RankIndex:
    """An index over `RunState.placements`, which only grows. The index keeps look-ups fast after many restarts."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, str], frozenset[int]] = {}
        self._taken = 0

    def find_ranks(self, placements: Sequence[Placement], attempt: int, node: str) -> frozenset[int]:
        """Return the ranks of a node in an attempt; empty if the node takes no part."""
        for number, name, ranks in placements[self._taken :]:
            self._ranks[number, name] = self._ranks.get((number, name), frozenset()).union(ranks)
        self._taken = len(placements)
        return self._ranks.get((attempt, node), frozenset())
