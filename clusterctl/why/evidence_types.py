"""The evidence about a run that went wrong: how its ranks ended, and snapshots of the ranks that had not ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from clusterctl.agent.protocol.record_types import (
    FlightRecorderEntry,
    GroupSetup,
    ProcessState,
    TcpConnection,
    WorkerStatusSample,
)
from clusterctl.why.verdict import Fault, format_ranks


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One Python call on a stack. An unknown `line` is 0."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """The end of a rank, which is between the times `earliest` and `latest` on the head's clock (seconds).

    Attributes:
        on_node_clock: The same two times on the clock of the node, for an exact comparison of ranks of one node.
        oom: The evidence that the kernel killed the rank because of a lack of memory; `None` if it did not.
        secondary: The message reports a lost peer, so another failure came first.
        failed_inside: The rank's Python failed, although its first process ended with 0.
        stopped: The controller stopped the rank. The exit code of a stopped rank means nothing; the message is older
            than the stop.
        cls: The problem class of the message (`headline`); `None` without a message.
        is_recognised: The message has a form that programs print when they end.
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
    cls: Fault | None = None
    is_recognised: bool = False
    failed_inside: bool = False

    @property
    def ended_well(self) -> bool:
        """Whether the rank and its Python ended with 0."""
        return self.exit_code == 0 and not self.failed_inside


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """The state of a rank at one moment.

    Attributes:
        source: How the stacks were read: shim, signal, py-spy, or proc (no stacks).
        frames: Calls of the main thread, most recent first; `None` if unknown.
        cpu: CPU cores that the rank uses.
        status_age: Seconds since the shim's thread last wrote a status; `None` without a shim.
        main_age: Seconds since the main thread last ran Python code; `None` if unknown.
        seq: For each process group: the numbers of the last begun collective and of the last ended collective.
        entries: The newest entries of the flight recorder; `None` without a recorder.
        setup: The values with which the rank sets up, or has set up, the default process group.
        call_values: Numbers, and hashes of texts ("#…"), of the innermost calls of the main thread, by name.
        awaited_keys: The keys of a store of torch that the rank has asked for and has not got all of.
        set_keys: The keys that the rank has set last.
        sockets: The connections of the rank, and the sockets on which it listens, as far as they are known.
        pid: The process that is the rank, on its machine.
        lock_holder: The process that took the lock of a file for which the rank waits.
        tail: The last lines of the output.
        blindness: Which collectives the shim cannot see with this backend and this torch; "" if it sees all.
        error: The reason why the snapshot is empty.
    """

    source: str
    state: str | None = None
    wchan: str | None = None
    cpu: float | None = None
    frames: tuple[StackFrame, ...] | None = None
    children: tuple[ProcessState, ...] = ()
    step: int | None = None
    status_age: float | None = None
    main_age: float | None = None
    seq: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    entries: tuple[FlightRecorderEntry, ...] | None = None
    setup: GroupSetup | None = None
    call_values: Mapping[str, str] = field(default_factory=dict)
    awaited_keys: tuple[str, ...] = ()
    set_keys: tuple[str, ...] = ()
    sockets: tuple[TcpConnection, ...] = ()
    pid: int | None = None
    lock_holder: int | None = None
    tail: tuple[str, ...] = ()
    blindness: str = ""
    error: str | None = None


def read_blindness(status: WorkerStatusSample | None) -> str:
    """Return which collectives the shim of a rank cannot see (`RankSnapshot.blindness`)."""
    return (status.get("degraded") or {}).get("recorder", "") if status else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeUse:
    """How a rank of a healthy run has recently spent its time.

    Attributes:
        seconds: The duration of the sampling.
        wait_shares: For each part of this time: the share of samples in which the rank was in a collective. `None` if
            collectives are not counted.
        idle_shares: For each part of the last two minutes: the share in which the rank probably waited. `None` if
            collectives are counted.
        idle_basis: What shows `idle_shares`, as words.
        cpu_cores: Cores that the rank and its children used.
        cpu_starved_share: Share of the time in which the main thread could run but had no CPU.
        disk_faults_per_s: Page faults per second for which the main thread had to read from a disk.
        gpu_clock_mhz: Clock of the slowest GPU of the node.
        other_waits: Reasons of waits outside of collectives, each with its share of all samples.
        blindness: Which collectives the shim cannot see, as in `RankSnapshot`.
    """

    seconds: float
    wait_shares: tuple[float, ...] | None
    idle_shares: tuple[float, ...] | None = None
    idle_basis: str = ""
    cpu_cores: float = 0.0
    cpu_starved_share: float = 0.0
    disk_faults_per_s: float = 0.0
    gpu_clock_mhz: float | None = None
    other_waits: Mapping[str, float] = field(default_factory=dict)
    blindness: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleRank:
    """A rank without progress in a run that is not stalled.

    Attributes:
        seconds: Seconds since the last progress of the rank.
        is_in_collective: The rank has begun a collective that has not ended.
        activity: What the rank does instead of making progress; "" if unknown.
    """

    seconds: float
    is_in_collective: bool
    activity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of the newest attempt.

    Attributes:
        end: The end of the rank; `None` while it runs.
        snapshot: The state of the rank before its end; `None` if no snapshot was taken.
        collective_counts: For each process group: the numbers of the last begun and of the last ended collective,
            shortly before the first rank ended.
        role: The role of its node; "" without roles.
        is_service: Whether another role needs this one.
    """

    rank: int
    node: str
    role: str = ""
    is_service: bool = False
    started: bool = True
    end: RankExit | None = None
    snapshot: RankSnapshot | None = None
    collective_counts: Mapping[str, tuple[int, int]] | None = None

    @property
    def snapshot_error(self) -> str:
        """Why there is no snapshot of the rank."""
        return (self.snapshot and self.snapshot.error) or "it was not examined"


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
        node: The node with the problem; `None` for all nodes.
        check: The name of the failed check; "" if no check failed.
    """

    node: str | None
    message: str
    check: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunError:
    """An error that ended the run without an exit of a worker. `kind` is a value of `Cause.kind`, or `refused`."""

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
        has_ended: Whether the run has ended.
        reason: The `StopReason` of the newest attempt; `None` while the attempt is not stopped.
        stalled: The stall rule has confirmed that no rank makes progress.
        stall_limit_s: Seconds without progress after which the stall rule confirms a stall.
        health_problems: Present health problems of each node.
        timings: How the ranks of a healthy run spend their time.
        idle_ranks: Ranks without progress.
        no_progress_s: Seconds since the start; `None` once any rank has made progress.
        evidence_folder: The folder with stored evidence; `None` if no rank was examined.
        run_folder: The folder of the run.
        warnings: A sentence for each warning about the end of the run.
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
    timings: Mapping[int, RankTimeUse] = field(default_factory=dict)
    idle_ranks: Mapping[int, IdleRank] = field(default_factory=dict)
    no_progress_s: float | None = None
    evidence_folder: str | None = None
    run_folder: str | None = None
    warnings: tuple[str, ...] = ()

    def split_by_role(self) -> dict[str, Evidence]:
        """Return the evidence of each role, the services last; the evidence itself without roles."""
        roles = dict.fromkeys(rank.role for rank in sorted(self.ranks, key=lambda rank: rank.is_service))
        if len(roles) < 2:
            return {"": self}
        own = {role: tuple(rank for rank in self.ranks if rank.role == role) for role in roles}
        return {
            role: replace(self, ranks=ranks, timings={r.rank: t for r in ranks if (t := self.timings.get(r.rank))})
            for role, ranks in own.items()
        }

    def name_ranks(self, ranks: Iterable[int]) -> str:
        """Return ranks for a sentence, with their node if all ranks are on one node."""
        numbers, nodes = list(ranks), {rank.rank: rank.node for rank in self.ranks}
        return format_ranks(numbers, (nodes[number] for number in numbers))
