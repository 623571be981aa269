"""Of the machine itself: what it is, what it leaves a worker, what lies and runs on it."""

from __future__ import annotations

from typing import TypedDict


class Memory(TypedDict):
    """Main memory; bytes, and bytes a second of `swap_rate`."""

    mem_total: int | None
    mem_available: int | None
    swap_used: int | None
    swap_rate: float | None


class Processors(TypedDict):
    """How the processors are run; of `governors` and `preferences` how many of them are set so."""

    load1: float | None
    governors: dict[str, int]
    frequency_driver: str | None
    preferences: dict[str, int]
    clocksource: str | None
    clock_error: float | None


class Shm(TypedDict):
    """The file system of shared memory, in bytes."""

    total: int
    free: int


class Limits(TypedDict):
    """What a worker may take; `None` is without limit."""

    memlock: int | None
    nproc: int | None
    nofile: int | None
    cgroup_mem_max: int | None
    cgroup_mem_free: int | None
    pids_max: int | None
    pids_free: int | None
    cpu_quota: float | None
    cpus: int | None
    cpus_allowed: int
    shm: Shm | None


class Environment(TypedDict):
    """What the environment says to libraries: values that hide nothing, and a hash of each."""

    env: dict[str, str | None]
    env_hashes: dict[str, str]


class Host(Memory, Processors, Limits, Environment):
    """The group `host`; `uptime` in seconds."""

    boot_id: str | None
    machine_id: str | None
    netns: str | None
    kernel: str
    arch: str
    distro: str | None
    user: str
    uptime: float | None


class Counter(TypedDict):
    """Errors of memory that a controller has counted, for so many seconds."""

    controller: str
    corrected: int | None
    uncorrected: int | None
    seconds: int | None


class Errors(TypedDict):
    """Errors that a card or a port has counted, by grade: each kind to how often."""

    correctable: dict[str, int]
    nonfatal: dict[str, int]
    fatal: dict[str, int]


class Way(Errors):
    """A card, or a port above it; `of`: of which card it is the way."""

    address: str
    of: str


class Hardware(TypedDict):
    """The group `hardware`."""

    pcie: list[Way]
    memory: list[Counter]


class Written(TypedDict):
    """Whether a file could be written, and why not."""

    writable: bool
    error: str | None


class Place(TypedDict, total=False):
    """A place where a run writes; bytes."""

    path: str
    what: str
    error: str | None
    writable: bool | None
    total: int
    free: int
    used: int
    inodes: int
    inodes_free: int
    readonly: bool


class Disk(TypedDict):
    """The group `disk`."""

    paths: list[Place]


class Mount(TypedDict):
    """A mount that was listed, and how that went."""

    path: str
    fs: str | None
    device: str | None
    status: str | None
    reason: str | None
    ms: float | None
    state: str | None
    wchan: str | None


class Mounts(TypedDict):
    """The group `mounts`; `left_out` were not looked at."""

    paths: list[Mount]
    left_out: int


class Checkpoint(TypedDict):
    """The group `checkpoint`."""

    path: str | None
    bytes: int | None


class OfRun(TypedDict):
    """A process that carries the marker of a run."""

    run: str
    pid: int
    comm: str


class Asleep(TypedDict):
    """A process that stays in state D; `gpu`: it holds one. `stuck_s`: it was not woken once for so long."""

    pid: int
    comm: str
    wchan: str | None
    gpu: bool
    stuck_s: float | None


class Procs(TypedDict):
    """The group `procs`."""

    runs: list[OfRun]
    dstate: list[Asleep]
    zombies: int
    own_namespace: bool
    fabric_manager: bool
    time_daemon: str | None


class Nccl(TypedDict):
    """The NCCL that torch would load."""

    nccl: str | None
    nccl_from: str | None


class Versions(Nccl):
    """The group `versions`."""

    python: str
    executable: str
    torch: str | None
    torch_cuda: str | None
    torch_hip: str | None
    net_plugin: str | None
    verbs: str | None
    packages: int
    packages_hash: str
    names: dict[str, str]
