"""JSON types of the status file of a worker, and of a line in the samples of a node. For the type checker only."""

from __future__ import annotations

from typing import Any, TypedDict

from typing_extensions import NotRequired


class _WorkerReport(TypedDict):
    pid: int
    step: int | None
    source: str | None
    beats: int
    seq: dict[str, tuple[int, int]] | None
    backend: str | None
    timeout_s: float | None
    frameworks: list[str]
    facts: dict[str, Any]
    degraded: dict[str, str]
    looks: NotRequired[int]
    held: NotRequired[int]


class Phase(TypedDict):
    """The phase of a worker since a moment of the node's monotonic clock (seconds), and its limit (seconds)."""

    name: str
    since: float
    limit_s: float


class PhaseAge(TypedDict):
    """The phase of a worker, and for how many seconds it has lasted."""

    name: str
    age_s: float
    limit_s: float


class WorkerStatus(_WorkerReport):
    """The status file of a worker. Times are the node's monotonic clock (seconds); `start_time` is in clock ticks."""

    start_time: int
    tid: int
    time: float
    progress_time: float | None
    main_time: float | None
    phase: Phase | None


class WorkerStatusSample(_WorkerReport):
    """The status of a worker in a sample, with ages in seconds. `unseen`: no process is left that updates it."""

    age_s: float
    progress_age_s: float | None
    main_age_s: float | None
    phase: PhaseAge | None
    unseen: NotRequired[bool]


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

    kind: str
    t: float
    m: float
    attempt: int


class RankActivity(TypedDict, total=False):
    """A rank at one moment. Bytes are those of its whole process tree, `None` if they cannot be read.

    For the main thread of the rank: `starved_s` are the seconds in which it could run and got no CPU, `faults` counts
        its
    waits for memory that had to be read from a disk.
    """

    alive: bool
    pid: int | None
    state: str | None
    wchan: str | None
    procs: int
    cpu_s: float
    read: int | None
    written: int | None
    output: int | None
    starved_s: float | None
    faults: int | None
    inside: WorkerStatusSample | None


class ActivitySample(SampleTime, total=False):
    """All ranks of a node at one moment, by rank.

    `watched` are the watched files: time (nanoseconds) and size (bytes) of each. `steady`: they have not changed.
    """

    gpus: bool
    ranks: dict[str, RankActivity]
    steady: bool
    watched: dict[str, tuple[int, int]] | None


class GpuSample(TypedDict, total=False):
    """A GPU at one moment: percent, bytes, degrees Celsius, watts, MHz. `err` and `codes` explain missing values."""

    gpu: int
    vendor: str | None
    uuid: str | None
    util: float | None
    mem_used: int | None
    mem_total: int | None
    temp_c: float | None
    mem_temp_c: float | None
    temp_limit_c: float | None
    mem_temp_limit_c: float | None
    power_w: float | None
    sm_clock: float | None
    throttle: int | None
    ecc_unc: int | None
    links_lost: int | None
    remap_pending: Any
    remap_failure: Any
    recovery_action: Any
    slowdown: list[str] | None
    err: dict[str, str] | None
    codes: dict[str, int | None] | None


class DiskSpace(TypedDict):
    """Space in a file system, in bytes."""

    path: str
    free: int
    total: int


class XidError(TypedDict):
    """An error that the GPU driver has reported; `gpu` is `None` if it belongs to no known index."""

    gpu: int | None
    xid: int


class MachineSample(TypedDict, total=False):
    """CPU and memory in percent and bytes, load, and the disks."""

    cpu: float | None
    mem: float | None
    mem_used: int | None
    mem_total: int | None
    load1: float | None
    disk: list[DiskSpace]


class GpuSamples(TypedDict, total=False):
    """The GPU samples of the driver, or why there are none: it has hung for `stuck_s` seconds in this state."""

    status: str
    reason: str | None
    gpus: list[GpuSample]
    xids: list[XidError]
    stuck_s: float
    state: str | None
    wchan: str | None


class HealthSample(SampleTime, MachineSample, GpuSamples, total=False):
    """A machine and its GPUs at one moment; `ms` is the duration of the sample."""

    ms: float
