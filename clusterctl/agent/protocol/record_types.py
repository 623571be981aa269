"""JSON types of the data that a node records, with bounds: worker status, samples, exits and evidence of ranks.

The head derives validators from these classes. An agent never imports this module at run time.
"""

from typing import Annotated

from typing_extensions import NotRequired, Required, TypedDict

from clusterctl.agent.protocol import wire_types
from clusterctl.agent.protocol.validators import MaxItems


class _WorkerReport(TypedDict, total=False):
    pid: wire_types.Pid
    step: wire_types.Count | None
    source: wire_types.Word | None
    beats: wire_types.Count
    seq: Annotated[dict[wire_types.Name, tuple[wire_types.Count, wire_types.Count]], MaxItems(4096)] | None
    backend: wire_types.Word | None
    timeout_s: wire_types.NonNegative | None
    frameworks: Annotated[list[wire_types.Word], MaxItems(64)]
    facts: Annotated[dict[wire_types.Word, wire_types.DisplayedFact], MaxItems(256)]
    degraded: Annotated[dict[wire_types.Word, wire_types.Name], MaxItems(64)]
    looks: wire_types.Count
    held: wire_types.Count


class Phase(TypedDict):
    """The phase of a worker. `since` is the phase's start on the node's monotonic clock; all times are in seconds."""

    name: wire_types.Word
    since: float
    limit_s: wire_types.NonNegative


class PhaseAge(TypedDict):
    """The name of a worker's phase, and the age and time limit of the phase in seconds."""

    name: wire_types.Word
    age_s: float
    limit_s: wire_types.NonNegative


class WorkerStatus(_WorkerReport):
    """The status file of a worker.

    Times are on the node's monotonic clock (seconds); `start_time` is in clock ticks.
    """

    start_time: wire_types.Count
    tid: wire_types.Pid
    time: float
    progress_time: float | None
    main_time: float | None
    phase: Phase | None


class WorkerStatusSample(_WorkerReport, total=False):
    """The status of a worker in a sample, with ages in seconds.

    `unseen` is true if nothing updates the status file any more.
    """

    age_s: float
    progress_age_s: float | None
    main_age_s: float | None
    phase: PhaseAge | None
    unseen: bool


class ShimProfileAnswer(TypedDict):
    """The shim's answer to a request for a profile, at `time` (wall clock).

    `state` is `recording`, `saved` or `failed`. `reason` says why the recording failed or ended early.
    """

    state: str
    time: float
    reason: str


class RankProfile(TypedDict):
    """The profile of a rank.

    `method` is `torch` (torch's profiler), `py-spy`, `samples` (of the stacks, by the shim), `signal` (dumps of the
    stacks) or `none`; `why` has the reasons why better methods failed. The recording began at `began` (wall clock), and
    its file is `rank-R.json`. `main_thread` is the id of the main thread by pthread, if the rank has a shim.
    """

    method: wire_types.Word
    why: Annotated[list[wire_types.LongText], MaxItems(256)]
    began: float
    main_thread: wire_types.Count | None


class StackDumpOffer(TypedDict):
    """The process whose shim can dump stacks, the signal that requests a dump, and the file that gets the dump."""

    pid: int
    start_time: int
    signal: int
    fd: int
    dev: int
    ino: int
    main_thread: int


class SampleTime(TypedDict, total=False):
    """The time and the attempt of a sample. `t` is the wall clock and `m` the monotonic clock, in seconds."""

    kind: wire_types.Word
    t: float
    m: float
    attempt: wire_types.Attempt


class RankActivity(TypedDict, total=False):
    """The activity of a rank at one moment. Byte counts cover the rank's process tree, or are `None`.

    `starved_s` are the seconds in which the main thread was ready to run and got no CPU. `faults` counts the major page
    faults of the main thread. `printed_steps` are the number of rising step numbers at the end of the output, and the
    last of these step numbers.
    """

    alive: bool
    pid: wire_types.Pid | None
    state: wire_types.ProcessFlags | None
    wchan: wire_types.Name | None
    procs: wire_types.Count
    cpu_s: wire_types.Measured
    read: wire_types.Count | None
    written: wire_types.Count | None
    output: wire_types.Count | None
    printed_steps: tuple[wire_types.Count, wire_types.Measured] | None
    starved_s: wire_types.Measured | None
    faults: wire_types.Count | None
    inside: WorkerStatusSample | None


class ActivitySample(SampleTime, total=False):
    """The activity of all ranks of a node at one moment, by rank.

    `watched` has the time (nanoseconds) and size (bytes) of each watched file. `steady` is true if all ranks make
    steady progress. The supervisor may then have skipped earlier samples.
    """

    gpus: bool
    ranks: Annotated[dict[wire_types.Digits, RankActivity], MaxItems(4096)]
    steady: bool
    watched: Annotated[dict[wire_types.WatchedPath, tuple[wire_types.Count, wire_types.Count]], MaxItems(256)] | None


class GpuSample(TypedDict, total=False):
    """The state of a GPU at one moment, in percent, bytes, degrees Celsius, watts and MHz.

    `err` and `codes` have the reasons for missing values, by field.
    """

    gpu: Required[wire_types.GpuIndex]
    vendor: wire_types.ShortText | None
    uuid: wire_types.Word | None
    util: wire_types.Measured | None
    mem_used: wire_types.Count | None
    mem_total: wire_types.Count | None
    temp_c: wire_types.Measured | None
    mem_temp_c: wire_types.Measured | None
    temp_limit_c: wire_types.Measured | None
    mem_temp_limit_c: wire_types.Measured | None
    power_w: wire_types.Measured | None
    sm_clock: wire_types.Measured | None
    pcie_gen: wire_types.Setting | None
    pcie_width: wire_types.Setting | None
    throttle: wire_types.Count | None
    ecc_unc: wire_types.Count | None
    links_lost: wire_types.Count | None
    remap_pending: wire_types.Setting | None
    remap_failure: wire_types.Setting | None
    recovery_action: wire_types.Setting | None
    slowdown: Annotated[list[wire_types.Word], MaxItems(64)] | None
    err: Annotated[dict[wire_types.Word, wire_types.Word], MaxItems(256)] | None
    codes: Annotated[dict[wire_types.Word, wire_types.Count | None], MaxItems(256)] | None


class DiskSpace(TypedDict):
    """The space of a file system, in bytes."""

    path: wire_types.WatchedPath
    free: wire_types.Count
    total: wire_types.Count


class XidError(TypedDict):
    """An XID error of the NVIDIA driver. `gpu` is `None` if the index of the GPU is unknown."""

    gpu: wire_types.GpuIndex | None
    xid: wire_types.Count


class MachineSample(TypedDict, total=False):
    """The CPU use and memory of a machine in percent and bytes, its load, and the space of its disks."""

    cpu: wire_types.Measured | None
    mem: wire_types.Measured | None
    mem_used: wire_types.Count | None
    mem_total: wire_types.Count | None
    load1: wire_types.Measured | None
    disk: Annotated[list[DiskSpace], MaxItems(64)] | None


class GpuSamples(TypedDict, total=False):
    """The samples of all GPUs, or the reason why they are missing.

    If the process that reads the GPUs hangs, `stuck_s` are the seconds since then, and `state` and `wchan` are its
    state and kernel function.
    """

    status: wire_types.ShortText | None
    reason: wire_types.Text | None
    gpus: Annotated[list[GpuSample], MaxItems(1024)]
    xids: Annotated[list[XidError], MaxItems(4096)]
    stuck_s: wire_types.Measured | None
    state: wire_types.Text | None
    wchan: wire_types.Text | None


class HealthSample(SampleTime, MachineSample, GpuSamples, total=False):
    """A machine and its GPUs at one moment; `ms` is the duration of the sample."""

    ms: wire_types.Measured | None


class SpawnRecord(TypedDict, total=False):
    """The identities of a waiter and its worker. The waiter writes this record before the worker runs.

    Start times are in clock ticks since boot.
    """

    pid: int
    start_time: int
    waiter_pid: int
    waiter_start_time: int
    boot: str
    pid_ns: str


class ExitRecord(TypedDict, total=False):
    """The exit of a worker. Both `exit_code` and `signal` are `None` if the exit status is unknown.

    The worker was still alive at `earliest` and had ended by `mono` (node's monotonic clock, seconds).
    """

    exit_code: int | None
    signal: int | None
    earliest: float
    mono: float
    fenced: bool


class SurvivingProcess(TypedDict):
    """A process that the node could not end, and the reason."""

    pid: wire_types.Pid
    start_time: wire_types.StartTime
    command: wire_types.Text
    why: wire_types.Text


SurvivingProcesses = Annotated[list[SurvivingProcess], MaxItems(65536)]


class LeftoverProcess(TypedDict):
    """A process that outlived its attempt and was ended.

    Attributes:
        rank: The rank that started the process, or `None` if the rank is unknown.
        age_s: The seconds since the start of the process.
    """

    pid: wire_types.Pid
    rank: wire_types.Rank | None
    command: wire_types.Text
    age_s: wire_types.NonNegative


LeftoverProcesses = Annotated[list[LeftoverProcess], MaxItems(256)]


class ChildFailure(TypedDict):
    """A failed child process. `message` is its exception, its exit code (`exit code 3`) or the signal that ended it."""

    pid: wire_types.Pid
    message: wire_types.Text


class WorkerError(TypedDict, total=False):
    """The exception of a worker, from its `TORCHELASTIC_ERROR_FILE`."""

    message: wire_types.Text
    traceback: wire_types.Traceback | None


class OutsideSignal(TypedDict):
    """A signal that a worker handled and that clusterctl did not send. The worker ended `before_s` seconds later."""

    signal: wire_types.SignalSent
    before_s: wire_types.NonNegative


class RemainingProcess(TypedDict):
    """A process of a run that may still live on a node. Fields are `None` if the process is unknown."""

    node: str
    pid: int | None
    start_time: int | None
    command: str | None
    why: str


class ProcessState(TypedDict):
    """The state of a process. `cpu` is the mean number of used cores over a quarter of a second."""

    pid: wire_types.Pid
    state: wire_types.ProcessFlags | None
    wchan: wire_types.Name | None
    name: NotRequired[wire_types.Name]
    cpu: NotRequired[float]
    command: NotRequired[wire_types.CommandLine]


class RankProcess(TypedDict):
    """The process that was started as a rank, and the output file of the rank."""

    rank: int
    pid: int
    start_time: int
    output: str | None


class FlightRecorderEntry(TypedDict):
    """An entry of torch's flight recorder: a collective or a point-to-point message.

    `done` is true if the operation has ended. `peer` is the source or destination rank, if the main thread is in the
    call of this operation; otherwise `None`.
    """

    group: wire_types.Name
    number: wire_types.Count
    op: wire_types.Name
    sizes: wire_types.Name
    dtypes: wire_types.Name
    done: bool
    p2p: bool
    peer: wire_types.Count | None


class GroupSetup(TypedDict):
    """The values with which a rank sets up its default process group; `address` is the address of the store."""

    address: wire_types.Name | None
    world_size: wire_types.Count
    rank: wire_types.Count


class CallValues(TypedDict):
    """What a rank works with, read together with its stacks.

    `values` has numbers as text, and hashes of texts with a leading "#", of the innermost calls of the main thread, by
    function and name. `awaited_keys` are the keys of a store of torch that the rank has asked for and has not got
    all of, and `set_keys` are the keys that it has set last.
    """

    values: Annotated[dict[wire_types.Word, wire_types.Word], MaxItems(64)]
    awaited_keys: Annotated[list[wire_types.Word], MaxItems(64)]
    set_keys: Annotated[list[wire_types.Word], MaxItems(64)]


class _Connection(TypedDict):
    address: wire_types.ShortText
    port: wire_types.Port
    peer: wire_types.ShortText
    peer_port: wire_types.Port
    state: wire_types.ShortText
    unacked: wire_types.Count
    unread: wire_types.Count
    lost: wire_types.Count
    awaited: bool


class TcpConnection(_Connection, total=False):
    """A TCP connection of a rank, or a socket on which the rank listens.

    `unacked` are sent bytes without acknowledgement, `unread` are received bytes that the process has not read. `lost`
    counts the retransmissions since the last acknowledgement. `awaited` is true if the main thread waits for data on
    this connection, `awaited_by_thread` is present if another thread does, or a child of the rank.
    """

    awaited_by_thread: bool


class RankEvidence(ProcessState):
    """The evidence of one rank.

    `source` is the source of the stacks (`shim`, `signal`, `py-spy`, `proc`). `why` has the reasons why better sources
    could not be used. `stacks` is the raw dump, and `tail` the last lines of output. `lock_holder` is the process that
    took the lock of a file for which the rank waits. `error` explains missing evidence. The head adds `node`.
    """

    rank: wire_types.Rank
    threads: NotRequired[wire_types.Count]
    source: wire_types.Name
    why: Annotated[list[wire_types.LongText], MaxItems(256)]
    stacks: wire_types.FileData
    main_thread: wire_types.Count | None
    inside: WorkerStatusSample | None
    children: Annotated[list[ProcessState], MaxItems(4096)]
    tail: Annotated[list[wire_types.CommandLine], MaxItems(4096)]
    setup: NotRequired[GroupSetup | None]
    recorded: NotRequired[Annotated[list[FlightRecorderEntry], MaxItems(128)] | None]
    calls: NotRequired[CallValues | None]
    sockets: NotRequired[Annotated[list[TcpConnection], MaxItems(128)]]
    lock_holder: NotRequired[wire_types.Count | None]
    error: NotRequired[wire_types.LongText]
    node: NotRequired[wire_types.Name]


class EvidenceAnswer(TypedDict, total=False):
    """The evidence of the ranks of a node, by rank. The collection took `took_s` seconds."""

    took_s: float
    ranks: Required[Annotated[dict[wire_types.Digits, RankEvidence], MaxItems(4096)]]
