"""JSON types of what a node records, with their bounds: status of workers, samples, exits, evidence of ranks.

The head derives validators from these classes; an agent never imports them.
"""

from typing import Annotated

from typing_extensions import NotRequired, Required, TypedDict

from clusterctl.agent.protocol import bounds
from clusterctl.agent.protocol.validators import MaxItems


class _WorkerReport(TypedDict, total=False):
    pid: bounds.Pid
    step: bounds.Count | None
    source: bounds.Word | None
    beats: bounds.Count
    seq: Annotated[dict[bounds.Name, tuple[bounds.Count, bounds.Count]], MaxItems(4096)] | None
    backend: bounds.Word | None
    timeout_s: bounds.NonNegative | None
    frameworks: Annotated[list[bounds.Word], MaxItems(64)]
    facts: Annotated[dict[bounds.Word, bounds.DisplayedFact], MaxItems(256)]
    degraded: Annotated[dict[bounds.Word, bounds.Name], MaxItems(64)]
    looks: bounds.Count
    held: bounds.Count


class Phase(TypedDict):
    """The phase of a worker since a moment of the node's monotonic clock (seconds), and its limit (seconds)."""

    name: bounds.Word
    since: float
    limit_s: bounds.NonNegative


class PhaseAge(TypedDict):
    """The phase of a worker, and for how many seconds it has lasted."""

    name: bounds.Word
    age_s: float
    limit_s: bounds.NonNegative


class WorkerStatus(_WorkerReport):
    """The status file of a worker. Times are the node's monotonic clock (seconds); `start_time` is in clock ticks."""

    start_time: bounds.Count
    tid: bounds.Pid
    time: float
    progress_time: float | None
    main_time: float | None
    phase: Phase | None


class WorkerStatusSample(_WorkerReport, total=False):
    """The status of a worker in a sample, with ages in seconds. `unseen`: no process is left that updates it."""

    age_s: float
    progress_age_s: float | None
    main_age_s: float | None
    phase: PhaseAge | None
    unseen: bool


class StackDumpOffer(TypedDict):
    """What a shim offers for stack dumps: its process, the signal that dumps, and the open file that gets the dump."""

    pid: int
    start_time: int
    signal: int
    fd: int
    dev: int
    ino: int
    main_thread: int


class SampleTime(TypedDict, total=False):
    """The time of a sample: wall clock `t`, monotonic clock `m` (seconds), and its attempt."""

    kind: bounds.Word
    t: float
    m: float
    attempt: bounds.Attempt


class RankActivity(TypedDict, total=False):
    """A rank at one moment. Bytes are those of its whole process tree, `None` if they cannot be read.

    For the main thread of the rank: `starved_s` are the seconds in which it could run and got no CPU, `faults` counts
    its waits for memory that had to be read from a disk.
    """

    alive: bool
    pid: bounds.Pid | None
    state: bounds.ProcessFlags | None
    wchan: bounds.Name | None
    procs: bounds.Count
    cpu_s: bounds.Measured
    read: bounds.Count | None
    written: bounds.Count | None
    output: bounds.Count | None
    starved_s: bounds.Measured | None
    faults: bounds.Count | None
    inside: WorkerStatusSample | None


class ActivitySample(SampleTime, total=False):
    """All ranks of a node at one moment, by rank.

    `watched` are the watched files: time (nanoseconds) and size (bytes) of each. `steady`: they have not changed.
    """

    gpus: bool
    ranks: Annotated[dict[bounds.Digits, RankActivity], MaxItems(4096)]
    steady: bool
    watched: Annotated[dict[bounds.WatchedPath, tuple[bounds.Count, bounds.Count]], MaxItems(256)] | None


class GpuSample(TypedDict, total=False):
    """A GPU at one moment: percent, bytes, degrees Celsius, watts, MHz. `err` and `codes` explain missing values."""

    gpu: Required[bounds.GpuIndex]
    vendor: bounds.ShortText | None
    uuid: bounds.Word | None
    util: bounds.Measured | None
    mem_used: bounds.Count | None
    mem_total: bounds.Count | None
    temp_c: bounds.Measured | None
    mem_temp_c: bounds.Measured | None
    temp_limit_c: bounds.Measured | None
    mem_temp_limit_c: bounds.Measured | None
    power_w: bounds.Measured | None
    sm_clock: bounds.Measured | None
    throttle: bounds.Count | None
    ecc_unc: bounds.Count | None
    links_lost: bounds.Count | None
    remap_pending: bounds.Setting | None
    remap_failure: bounds.Setting | None
    recovery_action: bounds.Setting | None
    slowdown: Annotated[list[bounds.Word], MaxItems(64)] | None
    err: Annotated[dict[bounds.Word, bounds.Word], MaxItems(256)] | None
    codes: Annotated[dict[bounds.Word, bounds.Count | None], MaxItems(256)] | None


class DiskSpace(TypedDict):
    """Space in a file system, in bytes."""

    path: bounds.WatchedPath
    free: bounds.Count
    total: bounds.Count


class XidError(TypedDict):
    """An error that the GPU driver has reported; `gpu` is `None` if it belongs to no known index."""

    gpu: bounds.GpuIndex | None
    xid: bounds.Count


class MachineSample(TypedDict, total=False):
    """CPU and memory in percent and bytes, load, and the disks."""

    cpu: bounds.Measured | None
    mem: bounds.Measured | None
    mem_used: bounds.Count | None
    mem_total: bounds.Count | None
    load1: bounds.Measured | None
    disk: Annotated[list[DiskSpace], MaxItems(64)] | None


class GpuSamples(TypedDict, total=False):
    """The GPU samples of the driver, or why there are none: it has hung for `stuck_s` seconds in this state."""

    status: bounds.ShortText | None
    reason: bounds.Text | None
    gpus: Annotated[list[GpuSample], MaxItems(1024)]
    xids: Annotated[list[XidError], MaxItems(4096)]
    stuck_s: bounds.Measured | None
    state: bounds.Text | None
    wchan: bounds.Text | None


class HealthSample(SampleTime, MachineSample, GpuSamples, total=False):
    """A machine and its GPUs at one moment; `ms` is the duration of the sample."""

    ms: bounds.Measured | None


class SpawnRecord(TypedDict, total=False):
    """The record that a waiter writes before its worker runs. Start times are in clock ticks since boot."""

    pid: int
    start_time: int
    waiter_pid: int
    waiter_start_time: int
    boot: str
    pid_ns: str


class ExitRecord(TypedDict, total=False):
    """The exit of a worker: `exit_code` or `signal`; neither if its status is unknown.

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
