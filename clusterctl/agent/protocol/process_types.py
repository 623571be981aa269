"""JSON types of processes with their bounds: start, exit, what remained of a run, the evidence of a rank.

The head derives validators from these classes; an agent never imports them.
"""

from typing import Annotated

from typing_extensions import NotRequired, Required, TypedDict

from clusterctl.agent.protocol import bounds
from clusterctl.agent.protocol.sample_types import WorkerStatusSample
from clusterctl.agent.protocol.validators import MaxItems


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

    pid: bounds.Pid
    start_time: bounds.StartTime
    command: bounds.Text
    why: bounds.Text


SurvivingProcesses = Annotated[list[SurvivingProcess], MaxItems(65536)]


class LeftoverProcess(TypedDict):
    """A process that outlived its attempt and was ended.

    Attributes:
        rank: The rank that started it, or `None` if that is unknown.
        age_s: Seconds since its start.
    """

    pid: bounds.Pid
    rank: bounds.Rank | None
    command: bounds.Text
    age_s: bounds.NonNegative


LeftoverProcesses = Annotated[list[LeftoverProcess], MaxItems(256)]


class ChildFailure(TypedDict):
    """A child process that failed: its exception, its exit code (`exit code 3`) or the signal that ended it."""

    pid: bounds.Pid
    message: bounds.Text


class WorkerError(TypedDict, total=False):
    """The exception of a worker, from its `TORCHELASTIC_ERROR_FILE`."""

    message: bounds.Text
    traceback: bounds.Traceback | None


class OutsideSignal(TypedDict):
    """A signal that a worker handled and that we did not send, so many seconds before its end."""

    signal: bounds.SignalSent
    before_s: bounds.NonNegative


class RemainingProcess(TypedDict):
    """A process of a run that may still live on a node; the fields are `None` if no process is known."""

    node: str
    pid: int | None
    start_time: int | None
    command: str | None
    why: str


class ProcessState(TypedDict):
    """A process; `cpu` is its share of one core over a quarter of a second."""

    pid: bounds.Pid
    state: bounds.ProcessFlags | None
    wchan: bounds.Name | None
    name: NotRequired[bounds.Name]
    cpu: NotRequired[float]
    command: NotRequired[bounds.CommandLine]


class RankProcess(TypedDict):
    """The process that was started as a rank, and its output file."""

    rank: int
    pid: int
    start_time: int
    output: str | None


class FlightRecorderEntry(TypedDict):
    """An entry of torch's flight recorder: a collective or message, by number and group; `done`: it has ended."""

    group: bounds.Name
    number: bounds.Count
    op: bounds.Name
    sizes: bounds.Name
    dtypes: bounds.Name
    done: bool
    p2p: bool


class TcpConnection(TypedDict):
    """A TCP connection of a rank.

    `unacked` and `unread` are bytes in flight and bytes to read. `lost` counts unanswered retransmissions of the newest
    segment. `awaited`: the main thread waits to read from the connection.
    """

    address: bounds.ShortText
    port: bounds.Port
    peer: bounds.ShortText
    peer_port: bounds.Port
    state: bounds.ShortText
    unacked: bounds.Count
    unread: bounds.Count
    lost: bounds.Count
    awaited: bool


class RankEvidence(ProcessState):
    """Evidence of one rank.

    `source` is the origin of the stacks (`signal`, `py-spy`, `proc`), `why` the reasons against better origins,
    `stacks` the raw dump, `tail` the last lines of output. `error` explains missing evidence. The head adds `node`.
    """

    rank: bounds.Rank
    threads: NotRequired[bounds.Count]
    source: bounds.Name
    why: Annotated[list[bounds.LongText], MaxItems(256)]
    stacks: bounds.FileData
    main_thread: bounds.Count | None
    inside: WorkerStatusSample | None
    children: Annotated[list[ProcessState], MaxItems(4096)]
    tail: Annotated[list[bounds.CommandLine], MaxItems(4096)]
    recorded: NotRequired[Annotated[list[FlightRecorderEntry], MaxItems(128)] | None]
    sockets: NotRequired[Annotated[list[TcpConnection], MaxItems(128)]]
    error: NotRequired[bounds.LongText]
    node: NotRequired[bounds.Name]


class EvidenceAnswer(TypedDict, total=False):
    """Evidence of the ranks of a node, by rank; `took_s` is the duration in seconds."""

    took_s: float
    ranks: Required[Annotated[dict[bounds.Digits, RankEvidence], MaxItems(4096)]]
