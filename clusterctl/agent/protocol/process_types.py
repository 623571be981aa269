"""JSON types of processes: start, exit, what remained of a run, the evidence of a rank. For the type checker only."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from typing_extensions import NotRequired

if TYPE_CHECKING:
    from clusterctl.agent.protocol.sample_types import WorkerStatusSample


class SpawnRecord(TypedDict, total=False):
    """What a waiter writes down before its worker may run. Start times are in clock ticks since boot."""

    pid: int
    start_time: int
    waiter_pid: int
    waiter_start_time: int
    boot: str
    pid_ns: str


class ExitRecord(TypedDict, total=False):
    """How a worker ended: `exit_code`, or `signal`, or neither where nobody was left to see it.

    It was alive at `earliest` and gone at `mono`, both of the node's monotonic clock (seconds).
    """

    exit_code: int | None
    signal: int | None
    earliest: float
    mono: float
    fenced: bool


class SurvivingProcess(TypedDict):
    """A process that a node could not end, and why."""

    pid: int
    start_time: int
    command: str
    why: str


class LeftoverProcess(TypedDict):
    """A process of an attempt that was there when it should have been gone, and was ended.

    Attributes:
        rank: Whose it was, or `None` where that does not show.
        age_s: Seconds since it was started.
    """

    pid: int
    rank: int | None
    command: str
    age_s: float


class RemainingProcess(TypedDict):
    """What may still be there of a run on a node; `None` where no process is known."""

    node: str
    pid: int | None
    start_time: int | None
    command: str | None
    why: str


class ProcessState(TypedDict):
    """A process; `cpu` is its share of one core over a quarter of a second."""

    pid: int
    state: str | None
    wchan: str | None
    name: NotRequired[str]
    cpu: NotRequired[float]
    command: NotRequired[str]


class RankProcess(TypedDict):
    """A process to look at: the one that was started as a rank, and the file that its output goes to."""

    rank: int
    pid: int
    start_time: int
    output: str | None


class FlightRecorderEntry(TypedDict):
    """An entry of the flight recorder: the collective or message of that number in a group; `done`: it has ended."""

    group: str
    number: int
    op: str
    sizes: str
    dtypes: str
    done: bool
    p2p: bool


class TcpConnection(TypedDict):
    """A TCP connection of a rank.

    `unacked` and `unread` are bytes on their way out and in, `lost` how often the newest of them was sent again without
    an answer; `awaited`: the main thread waits to read from it.
    """

    address: str
    port: int
    peer: str
    peer_port: int
    state: str
    unacked: int
    unread: int
    lost: int
    awaited: bool


class RankEvidence(ProcessState):
    """Evidence of one rank.

    `source` is how the stacks were had (`signal`, `py-spy`, `proc`), `why` what the rungs above said, `stacks` the text
    as dumped, `tail` the last lines of its output. `error` tells why there is nothing. `node` is told by the head.
    """

    rank: int
    threads: NotRequired[int]
    source: str
    why: list[str]
    stacks: str
    main_thread: int | None
    inside: WorkerStatusSample | None
    children: list[ProcessState]
    tail: list[str]
    recorded: NotRequired[list[FlightRecorderEntry] | None]
    sockets: NotRequired[list[TcpConnection]]
    error: NotRequired[str]
    node: NotRequired[str]


class EvidenceAnswer(TypedDict, total=False):
    """Evidence of the ranks of a node, by rank; `took_s` is how many seconds it took."""

    took_s: float
    ranks: dict[str, RankEvidence]
