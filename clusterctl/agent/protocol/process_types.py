"""JSON types of processes: start, exit, what remained of a run, the evidence of a rank. For the type checker only."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from typing_extensions import NotRequired

if TYPE_CHECKING:
    from clusterctl.agent.protocol.sample_types import WorkerStatusSample


class SpawnRecord(TypedDict, total=False):
    """The record that a waiter writes before its worker runs. Start times are in clock ticks since boot."""

    pid: int
    start_time: int
    waiter_pid: int
    waiter_start_time: int
    boot: str
    pid_ns: str


class ExitRecord(TypedDict, total=False):
    """The exit of a worker: `exit_code` or `signal`; neither if nobody could read its status.

    The worker was alive at `earliest` and gone at `mono`, on the node's monotonic clock (seconds).
    """

    exit_code: int | None
    signal: int | None
    earliest: float
    mono: float
    fenced: bool


class SurvivingProcess(TypedDict):
    """A process that the node could not end, and the reason."""

    pid: int
    start_time: int
    command: str
    why: str


class LeftoverProcess(TypedDict):
    """A process that outlived its attempt and was ended.

    Attributes:
        rank: The rank that started it, or `None` if that is unknown.
        age_s: Seconds since its start.
    """

    pid: int
    rank: int | None
    command: str
    age_s: float


class ChildFailure(TypedDict):
    """A process of `multiprocessing` that ended by an exception."""

    pid: int
    message: str


class RemainingProcess(TypedDict):
    """A process of a run that may still live on a node; the fields are `None` if no process is known."""

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
    """The process that was started as a rank, and its output file."""

    rank: int
    pid: int
    start_time: int
    output: str | None


class FlightRecorderEntry(TypedDict):
    """An entry of torch's flight recorder: a collective or message, by number and group; `done`: it has ended."""

    group: str
    number: int
    op: str
    sizes: str
    dtypes: str
    done: bool
    p2p: bool


class TcpConnection(TypedDict):
    """A TCP connection of a rank.

    `unacked` and `unread` are bytes in flight and bytes to read. `lost` counts unanswered retransmissions of the newest
    segment. `awaited`: the main thread waits to read from the connection.
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

    `source` is the origin of the stacks (`signal`, `py-spy`, `proc`), `why` the reasons against better origins,
    `stacks`
    the raw dump, `tail` the last lines of output. `error` explains missing evidence. The head adds `node`.
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
    """Evidence of the ranks of a node, by rank; `took_s` is the duration in seconds."""

    took_s: float
    ranks: dict[str, RankEvidence]
