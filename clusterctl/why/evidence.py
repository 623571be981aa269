"""What is known of a run that went wrong, as values: how its ranks ended, and where those were that had not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterctl.agent.protocol.record_types import FlightRecorderEntry, ProcessState, TcpConnection
from clusterctl.why.verdict import Class


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One Python call on a stack. `line` is 0 where it is not known."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How a rank ended by itself. `earliest` and `latest` bound it on the head's clock (seconds).

    Attributes:
        on_node_clock: The same two on the clock of its node, by which ranks of one node are compared.
        oom: What tells that the kernel killed it for memory.
        secondary: Its last words are those of a rank whose peer was lost.
        failed_inside: Its Python failed, although its first process ended with 0.
        stopped: We asked for it: how it ended says nothing, and its words are what it had said before.
        cls: What its message tells (`headline`); `None` where nothing was said.
        is_recognised: The message was recognised as the cause of an end.
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
    cls: Class | None = None
    is_recognised: bool = False
    failed_inside: bool = False

    @property
    def well(self) -> bool:
        """It ended with 0, and so did its Python."""
        return self.exit_code == 0 and not self.failed_inside


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """A rank as it was seen at one moment.

    Attributes:
        source: How its stacks were had: signal, py-spy, proc (none).
        frames: Calls of its main thread, most recent first; `None` where they are not known.
        cpu: Share of one core.
        status_age: Seconds since the shim's own thread last wrote; `None` without a shim.
        seq: Last collective begun, and ended, by process group.
        entries: The newest of the flight recorder; `None` where it was not had.
        sockets: Its connections, as far as they could be seen.
        error: Why there is nothing.
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
    """What a rank of a run that moves did with its time of late.

    Attributes:
        seconds: How long it was watched.
        waits: Share of looks at which it was in a collective, in each part of that time; `None` where that is not
            counted.
        cpu: Cores that it and its children used.
        starved: Share of the time in which its main thread could run and had no CPU.
        faults: How often a second its main thread waited for memory that was read from a disk.
        clock: MHz of the slowest GPU of its node.
        waits_for: What it waited for when it was in no collective, in words, by share of all looks.
    """

    seconds: float
    waits: tuple[float, ...] | None
    cpu: float = 0.0
    starved: float = 0.0
    faults: float = 0.0
    clock: float | None = None
    waits_for: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleRank:
    """A rank of a run that nobody calls stalled.

    Attributes:
        seconds: For how long it has made no progress.
        waits: It has begun a collective that has not ended.
        does: What it spends its time with, in words; "" where that does not show.
    """

    seconds: float
    waits: bool
    does: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of the newest attempt: `end` once it has ended, `look` where somebody saw it before.

    Attributes:
        counted: Last collective begun, and ended, by process group, shortly before the first rank ended.
    """

    rank: int
    node: str
    started: bool = True
    end: RankExit | None = None
    look: RankSnapshot | None = None
    counted: Mapping[str, tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node: how its link is, and the addresses by which peers know it."""

    node: str
    link: str = "connected"
    why: str = ""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRefusal:
    """One reason for which a start was refused: a check that failed, or what a node answered.

    Attributes:
        node: Whose; `None` where it is about all of them.
        check: The name of the check; empty where none spoke.
    """

    node: str | None
    message: str
    check: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunError:
    """What ended the run where no exit of a worker did: `kind` of `blame.Cause`, or why it never started."""

    kind: str
    message: str
    node: str | None = None
    hint: str = ""
    reasons: tuple[StartRefusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that the verdict rests on.

    Attributes:
        run: Its id.
        over: It has ended.
        reason: The `StopReason` for which its newest attempt was ended; `None` while nobody ends it.
        stalled: The rule found, or has found, that nothing moves.
        limit: After how many seconds (of the rule).
        troubles: What health says of nodes now, in words, by node.
        paces: What ranks of a run that moves did with their time, by rank.
        standing: For how long its ranks have made no progress and what they do meanwhile, by rank.
        unbegun: For how many seconds its ranks have run without any sign of progress; `None` once there was one.
        seen_at: The folder in which the evidence lies; `None` where nobody looked.
        folder: The run's folder, for people.
        warnings: What a person shall know of its end beside how it ended, a sentence each.
    """

    run: str
    over: bool
    reason: str | None
    ranks: tuple[Rank, ...]
    nodes: Mapping[str, Node] = field(default_factory=dict)
    stalled: bool = False
    limit: float | None = None
    other: RunError | None = None
    troubles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    paces: Mapping[int, RankTiming] = field(default_factory=dict)
    standing: Mapping[int, IdleRank] = field(default_factory=dict)
    unbegun: float | None = None
    seen_at: str | None = None
    folder: str | None = None
    warnings: tuple[str, ...] = ()
