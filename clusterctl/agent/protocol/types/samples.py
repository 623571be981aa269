"""Lines of a node's samples: activity of its ranks, health of machine and GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.worker_status import Inside


class Stamped(TypedDict, total=False):
    """When a sample was taken: wall clock `t`, monotonic clock `m` (seconds), and in which attempt."""

    kind: str
    t: float
    m: float
    attempt: int


class RankActivity(TypedDict, total=False):
    """A rank at one moment; bytes are of its whole tree of processes, `None` where they cannot be read.

    Of the main thread of the process that is the rank: `starved_s`, for how long it could run and had no CPU, and
    `faults`, how often it waited for memory that had to be read from a disk.
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
    inside: Inside | None


class Activity(Stamped, total=False):
    """All ranks of a node at one moment, by rank.

    `watched` are the files that were to be watched: time (nanoseconds) and size (bytes) of each. `steady`: they are as
    before.
    """

    gpus: bool
    ranks: dict[str, RankActivity]
    steady: bool
    watched: dict[str, tuple[int, int]] | None


class Gpu(TypedDict, total=False):
    """A GPU at one moment: percent, bytes, degrees Celsius, watts, MHz. `err` and `codes` tell what cannot be read."""

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


class Disk(TypedDict):
    """Space in a file system, in bytes."""

    path: str
    free: int
    total: int


class Xid(TypedDict):
    """An error that the GPU driver has reported; `gpu` is `None` where it is none of the indices."""

    gpu: int | None
    xid: int


class Machine(TypedDict, total=False):
    """CPU and memory in percent and bytes, load, and the disks."""

    cpu: float | None
    mem: float | None
    mem_used: int | None
    mem_total: int | None
    load1: float | None
    disk: list[Disk]


class Gpus(TypedDict, total=False):
    """What the driver said, or why it did not: stuck for `stuck_s` seconds, in that state, at that place."""

    status: str
    reason: str | None
    gpus: list[Gpu]
    xids: list[Xid]
    stuck_s: float
    state: str | None
    wchan: str | None


class Health(Stamped, Machine, Gpus, total=False):
    """A machine and its GPUs at one moment; `ms`: how long the look took."""

    ms: float
