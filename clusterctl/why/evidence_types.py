"""The evidence about a run that went wrong: how its ranks ended, and snapshots of the ranks that had not ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from clusterctl.agent.protocol.record_types import FlightRecorderEntry, ProcessState, TcpConnection
from clusterctl.why.verdict import ProblemClass, format_ranks


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One Python call on a stack. `line` is 0 if it is not known."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How a rank ended. `earliest` and `latest` bound the time on the head's clock (seconds).

    Attributes:
        on_node_clock: Both bounds on the clock of its node, which compare ranks of one node exactly.
        oom: How it is known that the kernel killed the rank for lack of memory.
        secondary: Its last words say that it lost a peer.
        failed_inside: Its Python failed, although its first process ended with 0.
        stopped: The controller stopped it. Then its exit says nothing, and its message is from before the stop.
        cls: The class of its message (`headline`); `None` without a message.
        is_recognised: The message is known as one that ends a program.
    """

    exit_code: int | None
    signal: str | None
    earliest: float
    latest: float
    on_node_clock: tuple[float, float] | None = None
    oom: str | None = None
    message: str = ""
    traceback: str | None = None
    tail: str = ""
    secondary: bool = False
    stopped: bool = False
    cls: ProblemClass | None = None
    is_recognised: bool = False
    failed_inside: bool = False

    @property
    def ended_well(self) -> bool:
        """Whether the rank and its Python ended with 0."""
        return self.exit_code == 0 and not self.failed_inside


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """A rank at one moment.

    Attributes:
        source: How its stacks were read: signal, py-spy, or proc (no stacks).
        frames: Calls of its main thread, most recent first; `None` if they are not known.
        cpu: Share of one core.
        status_age: Seconds since the shim's own thread last wrote; `None` without a shim.
        seq: The last collective begun and the last one ended, by process group.
        entries: The newest entries of the flight recorder; `None` without a recorder.
        sockets: Its connections, as far as they are known.
        error: Why the snapshot is empty.
    """

    source: str
    state: str | None = None
    wchan: str | None = None
    cpu: float | None = None
    frames: tuple[StackFrame, ...] | None = None
    children: tuple[ProcessState, ...] = ()
    step: int | None = None
    status_age: float | None = None
    seq: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    entries: tuple[FlightRecorderEntry, ...] | None = None
    sockets: tuple[TcpConnection, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """What a rank of a healthy run has recently spent its time on.

    Attributes:
        seconds: How long the rank was sampled.
        wait_shares: In each part of that time, the share of samples with the rank in a collective; `None` if
            collectives are not counted.
        cpu_cores: Cores that it and its children used.
        cpu_starved_share: Share of the time in which its main thread could run and had no CPU.
        disk_faults_per_s: Page faults of its main thread per second that read from a disk.
        gpu_clock_mhz: Clock of the slowest GPU of its node.
        other_waits: What it waited for outside of collectives, each with the share of all samples.
    """

    seconds: float
    wait_shares: tuple[float, ...] | None
    cpu_cores: float = 0.0
    cpu_starved_share: float = 0.0
    disk_faults_per_s: float = 0.0
    gpu_clock_mhz: float | None = None
    other_waits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleRank:
    """A rank without progress in a run that is not stalled.

    Attributes:
        seconds: For how long it has made no progress.
        is_in_collective: It has begun a collective that has not ended.
        activity: What it spends its time on; "" if that is not known.
    """

    seconds: float
    is_in_collective: bool
    activity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of the newest attempt.

    Attributes:
        end: How it ended; `None` while it runs.
        snapshot: The rank before its end; `None` if nobody looked at it.
        collective_counts: The last collective begun and the last one ended, by process group, shortly before the
            first rank ended.
    """

    rank: int
    node: str
    started: bool = True
    end: RankExit | None = None
    snapshot: RankSnapshot | None = None
    collective_counts: Mapping[str, tuple[int, int]] | None = None

    @property
    def snapshot_error(self) -> str:
        """Why there is no snapshot of the rank."""
        return (self.snapshot and self.snapshot.error) or "nobody looked at it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node: the state of its link, and the addresses at which peers reach it."""

    node: str
    link: str = "connected"
    why: str = ""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRefusal:
    """One reason for which a start was refused: a failed check, or the error of a node.

    Attributes:
        node: The node that it is about; `None` for all nodes.
        check: The name of the failed check; empty if no check failed.
    """

    node: str | None
    message: str
    check: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunError:
    """What ended the run without an exit of a worker: the kind of its `Cause`, or why it never started."""

    kind: str
    message: str
    node: str | None = None
    hint: str = ""
    reasons: tuple[StartRefusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All evidence about a run.

    Attributes:
        run: The id of the run.
        has_ended: The run has ended.
        reason: The `StopReason` of its newest attempt; `None` while the attempt is not stopped.
        stalled: The stall rule says, or has said, that nothing moves.
        stall_limit_s: After how many seconds the stall rule says so.
        health_problems: Present health problems of each node.
        timings: What the ranks of a healthy run spend their time on.
        idle_ranks: For how long ranks have made no progress, and what they do meanwhile.
        no_progress_s: Seconds since the start, if no rank has made any progress; `None` after the first progress.
        evidence_folder: The folder with stored evidence; `None` if no rank was observed.
        run_folder: The folder of the run.
        warnings: One sentence for each finding about its end beside the cause.
    """

    run: str
    has_ended: bool
    reason: str | None
    ranks: tuple[Rank, ...]
    nodes: Mapping[str, Node] = field(default_factory=dict)
    stalled: bool = False
    stall_limit_s: float | None = None
    run_error: RunError | None = None
    health_problems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    timings: Mapping[int, RankTiming] = field(default_factory=dict)
    idle_ranks: Mapping[int, IdleRank] = field(default_factory=dict)
    no_progress_s: float | None = None
    evidence_folder: str | None = None
    run_folder: str | None = None
    warnings: tuple[str, ...] = ()

    def name_ranks(self, ranks: Iterable[int]) -> str:
        """Return ranks for a sentence, with their node if all are on one."""
        numbers, nodes = list(ranks), {rank.rank: rank.node for rank in self.ranks}
        return format_ranks(numbers, (nodes[number] for number in numbers))
