"""The attempts of a run that are over: what each of them came to, as the journal keeps it once another follows. Pure.

The nodes' journals tell of the newest attempt alone: what is known of an earlier one has been written down at its end.

What is known about a run: a fold over the journals of its nodes and of its controller. No I/O, no clock.

Run states: starting running stalled restarting stopping, then succeeded failed cancelled lost.
Worker states: pending starting running exited lost.

Which ranks were placed where: asked for each piece of output, so it must not cost more with every restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from clusterctl.agent.protocol.record_types import LeftoverProcess, RemainingProcess
from clusterctl.agent.protocol.requests import StopReason
from clusterctl.formatting import duration_text
from clusterctl.run.rules import controller_events as head
from clusterctl.run.rules.blame import (
    BACKGROUND_MAX_S,
    Cause,
    ExitAnalysis,
    build_left_work_cause,
    find_early_exit,
    find_failed_before_stop,
    is_idle_process,
    sort_causes,
)

_JSON_FIELDS = ("kind", "node", "rank", "exit_code", "signal", "message", "certain")
_MAX_MESSAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """An attempt that another followed. Times are the head's.

    Attributes:
        why: The word of `restart.on` for its end.
        cause: The first observed failure, without its traceback; `None` where an older controller wrote the journal.
        step: What its slowest rank had reached.
        resume_from: The checkpoint that it was told to go on from.
    """

    number: int
    began: float | None
    ended: float
    why: str = ""
    cause: Cause | None = None
    step: int | None = None
    resume_from: str | None = None


def cause_to_json(cause: Cause | None) -> dict[str, Any] | None:
    """Return a cause as the journal keeps it; its traceback lies with the output of the attempt."""
    if cause is None:
        return None
    return {key: getattr(replace(cause, message=cause.message[:_MAX_MESSAGE]), key) for key in _JSON_FIELDS}


def cause_from_json(record: dict[str, Any] | None) -> Cause | None:
    """Return the cause that a journal keeps; what only a newer controller knows of it is left out."""
    return None if record is None else Cause(**{key: record[key] for key in _JSON_FIELDS if key in record})


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


_PENDING = (WorkerPhase.PENDING, WorkerPhase.STARTING)


class NodePhase(str, Enum):
    """What a node does for the current attempt, or that nobody knows."""

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
        start_time: In clock ticks since the boot of its node.
        stopped: We asked for its end.
        tail: The end of its output; where we stopped it, only if it had printed a traceback before that.
        cause_before_stop: Why it was about to fail when we stopped it, as it had printed it.
        swallowed: The exception with whose traceback its output ends, and its line, although it ended with 0; else "".
        outside_signal: Which signal that we had not sent it had handled, and how many seconds before it ended with 0.
        worked_alone: It ended well, had torch, and was never in a process group with others.
        failed_child: Pid of the first child process of its Python that failed, and its exception, exit code or signal.
        shell_error: What a shell below it said of a command that failed, although it ended well; else "".
        output_failure: What its output says of a training that did not take place or failed, although it ended well.
        lacks_python: It ended well, and no Python began in it although its command names one.
        began_s: When it was started, by the monotonic clock of its node.
        lasted_s: How long its first process lived, once it has ended.
        has_failed_inside: Its Python failed, although its first process ended with 0.
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
    swallowed: str = ""
    outside_signal: tuple[str, float] | None = None
    cause_before_stop: Cause | None = None
    worked_alone: bool = False
    failed_child: tuple[int, str] | None = None
    shell_error: str = ""
    output_failure: str = ""
    lacks_python: bool = False
    began_s: float | None = None
    lasted_s: float | None = None
    has_failed_inside: bool = False
    exit_analysis: ExitAnalysis | None = None

    @property
    def failed(self) -> bool:
        """It ended by itself, and not well. An exit that nobody saw counts."""
        bad = self.exit_code != 0 or self.has_failed_inside
        return self.phase is WorkerPhase.EXITED and not self.stopped and bad

    @property
    def ended_well(self) -> bool:
        """It ended by itself, with 0, and so did its Python as far as it was watched."""
        return self.phase is WorkerPhase.EXITED and not self.stopped and not self.failed

    @property
    def is_exit_unknown(self) -> bool:
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
        group: Ranks of the process group in which its workers are, and how many that has.
        leftovers: What was at work there when all ranks had ended well, and was ended.
        past_grace: What did not end in the grace of a stop, and was killed.
        grace_s: That grace.
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
    remaining: tuple[RemainingProcess, ...] = ()
    group: tuple[tuple[int, ...], int] | None = None
    leftovers: tuple[LeftoverProcess, ...] = ()
    past_grace: tuple[LeftoverProcess, ...] = ()
    grace_s: float = 0.0
    port_conflict: str | None = None
    gpu_memory_held: str | None = None
    clock: tuple[float, float] | None = None
    ahead: float = 0.0
    boot: str = ""
    seq: int = 0

    def describe_silence(self, seconds: float | None = None) -> str:
        """Return that the node does not answer, for how long, and why where its connection broke for a reason."""
        time = "" if not seconds else f" for {duration_text(seconds)}"
        silent = not self.link_why or self.link_why == "no answer" or "no sign of life" in self.link_why
        return f"no answer{time}" + ("" if silent else f" ({self.link_why.removeprefix(f'{self.node}: ')})")


class MutableNodes(dict[str, NodeState]):
    """The nodes of a state that `StateBuilder` builds: events change the table in place."""


class MutableWorkers(dict[int, WorkerState]):
    """The workers of such a state. The table counts the workers that were not started yet."""

    def __init__(self, workers: Mapping[int, WorkerState]) -> None:
        super().__init__(workers)
        self.pending_count = sum(w.phase in _PENDING for w in workers.values())

    def put(self, worker: WorkerState) -> None:
        """Store a new state of a worker."""
        self.pending_count += (worker.phase in _PENDING) - (self[worker.rank].phase in _PENDING)
        self[worker.rank] = worker

    @classmethod
    def has_pending(cls, workers: Mapping[int, WorkerState]) -> bool:
        """Return whether any worker of a table, mutable or not, was not started yet."""
        if isinstance(workers, cls):
            return workers.pending_count > 0
        return any(w.phase in _PENDING for w in workers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StallView:
    """What the stall rule says. `phase` is suspected or confirmed; `evidence` is a folder of the run.

    Attributes:
        until: When it was over, of one that is.
    """

    phase: str
    since_s: float
    limit_s: float
    reason: str
    at: float
    evidence: str | None = None
    until: float | None = None

    def at_time(self, now: float) -> StallView:
        """Return it as it is at a moment (head's wall clock): its length grows, and its event tells that of then."""
        return replace(self, since_s=self.since_s + max(0.0, now - self.at))


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
        stood: The last standstill of this attempt that is over.
        placed: Attempt, node and ranks of all that was ever started.
        traces: Nodes on which something of the run may lie, of all attempts and of starts that failed.
        newest: Which checkpoint was the newest when the current attempt began, and as it was then.
        resume_from: The checkpoint that the current attempt was told to go on from.
        past: The attempts before the current one.
        unread: The first line of each file of the run that could not be read, and why.
        endings: How each attempt that was followed by another ended, and what was the newest checkpoint at its begin.
        next_nodes: Nodes of the attempt that a run in state restarting waits for, in order of node rank.
        restart_why: The word of `restart.on` for it.
        results: What was fetched at the end, or `None`.
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
    external_cause: Cause | None = None
    stall: StallView | None = None
    last_stall: StallView | None = None
    remaining: tuple[RemainingProcess, ...] = ()
    error: dict[str, Any] | None = None
    troubles: dict[tuple[str, int | None, str], head.Health] = field(default_factory=dict)
    restarts: tuple[float, ...] = ()
    restart_at: float | None = None
    restart_why: str = ""
    next_nodes: tuple[str, ...] = ()
    retired: dict[str, NodeState] = field(default_factory=dict)
    placements: tuple[tuple[int, str, tuple[int, ...]], ...] = ()
    touched_nodes: tuple[str, ...] = ()
    newest_checkpoint: str | None = None
    endings: tuple[tuple[str, str | None], ...] = ()
    resume_from: str | None = None
    past_attempts: tuple[PastAttempt, ...] = ()
    unreadable_lines: tuple[str, ...] = ()
    results: head.Results | None = None

    @property
    def over(self) -> bool:
        """The run has ended."""
        return self.phase.final

    @property
    def may_run(self) -> bool:
        """It has not ended, or something of it may still be there."""
        return not self.over or bool(self.remaining)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """What is to blame, the first observed failure on top; worked out whenever it is asked for.

        Where no rank failed and the others were stopped all the same, a rank that ended well too early is to blame; so
        it is where all that failed had lost their connection to it. Those that had printed why they fail before they
        were stopped come before ranks that only lost a peer.
        """
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
            at_work = [(n.node, one) for n in self.nodes.values() for one in n.leftovers if not is_idle_process(one)]
            return tuple(build_left_work_cause(*each) for each in at_work)
        return () if self.external_cause is None else (self.external_cause,)

    @property
    def cause(self) -> Cause | None:
        """The first observed failure."""
        return next(iter(self.causes), None)

    @property
    def has_left_work(self) -> bool:
        """All ranks ended well within seconds and left something at work, which was ended: the job was not done."""
        workers = self.workers.values()
        is_at_work = any(not is_idle_process(one) for node in self.nodes.values() for one in node.leftovers)
        return is_at_work and all(
            w.ended_well and w.lasted_s is not None and w.lasted_s < BACKGROUND_MAX_S for w in workers
        )

    def _failed_before_stop(self) -> tuple[Cause, ...]:
        workers = self.workers.values()
        stopped = [w.cause_before_stop for w in workers if w.cause_before_stop is not None]
        failed = [(w.exit_analysis, w.tail) for w in workers if w.failed and w.exit_analysis is not None]
        return find_failed_before_stop(stopped, failed) if stopped else ()

    def _lost_with_node(self, worker: WorkerState) -> bool:
        """Return whether nobody saw a worker's end because its machine went down with it: that is what is to blame."""
        return worker.is_exit_unknown and self.nodes[worker.node].link == "lost"

    def list_unfinished_nodes(self) -> list[str]:
        """Return the nodes on which a rank has not ended."""
        return list({w.node: None for w in self.workers.values() if w.phase is not WorkerPhase.EXITED})

    def ahead(self, node: str) -> float:
        """Return by how many seconds the wall clock of a node is ahead of the head's; 0 where that is not known."""
        state = self.nodes.get(node) or self.retired.get(node)
        return 0.0 if state is None else state.ahead

    def node_phase(self, node: str) -> NodePhase:
        """Return what a node is doing, in one word."""
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
    """An index over `RunState.placed`, which only ever grows."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, str], frozenset[int]] = {}
        self._taken = 0

    def find_ranks(self, placed: Sequence[Placement], attempt: int, node: str) -> frozenset[int]:
        """Return the ranks that a node has in an attempt; none where it takes no part in it."""
        for number, name, ranks in placed[self._taken :]:
            self._ranks[number, name] = self._ranks.get((number, name), frozenset()).union(ranks)
        self._taken = len(placed)
        return self._ranks.get((attempt, node), frozenset())
