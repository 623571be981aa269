"""JSON types of the status file of a worker, and of a line in the samples of a node, with their bounds.

The head derives validators from these classes; an agent never imports them.
"""

from typing import Annotated

from typing_extensions import Required, TypedDict

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
