"""JSON types of the health facts of a node: the request of a probe, and its answer with bounds.

The head derives validators from these classes; an agent never imports them. `clusterctl.agent.facts` documents the data
of each group.
"""

from typing import Annotated, Any

from typing_extensions import Required, TypedDict

from clusterctl.agent.protocol import bounds
from clusterctl.agent.protocol.validators import MaxItems


class FactsRequest(TypedDict, total=False):
    """The facts to collect (`groups`; default all), and what the collectors must know. Deadlines are in seconds."""

    groups: list[str] | None
    deadline: float
    deadlines: dict[str, float]
    workdir: str | None
    mounts: list[str]
    peers: dict[str, str]
    ports: list[int]
    expect_gpus: bool
    checkpoints: str | None
    node: str
    run: str | None
    salt: str
    root: str
    paths: list[str]


class FactGroup(TypedDict, total=False):
    """One group of facts: `data`, the `status` of its collection, the `reason` of a failure, and the duration `ms`.

    If the collector hung, also its process: pid, state, kernel function, and whether even SIGKILL did not end it.
    """

    status: Required[bounds.Word]
    reason: bounds.Reason | None
    data: bounds.Data
    ms: float | None
    pid: bounds.Pid
    state: bounds.ProcessFlags | None
    wchan: bounds.Name | None
    abandoned: bool


class StuckProcess(TypedDict, total=False):
    """A process of the probe that cannot be ended."""

    group: bounds.Word
    pid: bounds.Pid
    state: bounds.ProcessFlags | None
    wchan: bounds.Name | None


class Facts(TypedDict, total=False):
    """All groups of facts, and the processes that hang; `time` is the wall clock (seconds), `ms` the duration."""

    schema: int
    ms: float
    groups: Required[Annotated[dict[bounds.Word, FactGroup], MaxItems(256)]]
    time: float
    stuck: Annotated[list[StuckProcess], MaxItems(256)]


class PcieLinkWidth(TypedDict):
    """PCIe lanes of a card: in use, possible for the card, and possible for the slot."""

    width: int | None
    max_width: int | None
    slot_width: int | None


class PcieCard(PcieLinkWidth):
    """The driver of a card, and the number of its device node."""

    driver: str | None
    minor: int | None


PciGpu = TypedDict(
    "PciGpu",
    {
        "address": str, "vendor": str, "class": str, "driver": str | None, "minor": int | None,
        "width": int | None, "max_width": int | None, "slot_width": int | None,
    },
)  # fmt: skip
"""A GPU on the PCI bus."""


class DeviceNode(TypedDict):
    """A device node, and whether this user may open it."""

    path: str
    readable: bool


class DriverFacts(TypedDict):
    """The group `driver`."""

    module: str | None
    proc_version: str | None
    nouveau: bool
    modules: list[str]
    nvswitches: int
    pci: list[PciGpu]
    dev: list[DeviceNode]
    imex: list[DeviceNode]
    helper: bool


class HiddenGpuFacts(TypedDict):
    """The group `unshown`: GPUs of `driver.pci` that NVML does not show, each with the result of opening its `node`."""

    gpus: list[dict[str, Any]]


class SmiGpu(TypedDict):
    """A GPU as `nvidia-smi` lists it."""

    index: int
    uuid: str
    name: str
    pci: str
    driver: str


class SmiFacts(TypedDict):
    """The group `smi`; `rc` is the exit status of the program."""

    rc: int
    devices: list[SmiGpu]
    errors: list[str]


class LibraryGpu(TypedDict, total=False):
    """A GPU by its vendor's library: values by name, and why others are missing, in words and as error codes."""

    vendor: str
    index: int
    v: dict[str, Any]
    err: dict[str, str]
    codes: dict[str, int]
    odd: dict[str, int]


class NvmlSystem(TypedDict, total=False):
    """Versions, number of GPUs and the time of opening NVML; `*_error` are NVML's error codes."""

    init_error: int | None
    init_ms: float
    driver: str | None
    nvml: str | None
    cuda: int | None
    cuda_error: int | None
    count: int | None
    count_error: int | None


class NvmlFacts(NvmlSystem, total=False):
    """The group `nvml`; `p2p`: `[i, j, status by NVLink, status of reading]`."""

    devices: list[LibraryGpu]
    p2p: list[list[int | None]]
    uvm: str


class NodeAccess(TypedDict):
    """A device node, and the result of opening it."""

    path: str
    access: str


class AmdgpuFacts(TypedDict):
    """The group `amdgpu`; the device cgroup hides `hidden` GPUs from us."""

    driver: str | None
    count: int
    hidden: int
    dev: list[NodeAccess]
    numa_balancing: int | None
    devices: list[LibraryGpu]


class GpuProcess(TypedDict, total=False):
    """A process that uses a GPU; `agent`: a monitoring process that has all GPUs open and computes nothing."""

    pid: int
    used: int | None
    kind: str
    comm: str | None
    user: int | None
    run: str | None
    visible: bool
    agent: bool


class KernelLogFacts(TypedDict, total=False):
    """The group `kernel_log`; `since_s` is the age of its oldest line."""

    source: str
    uptime: float
    since_s: float | None
    dropped: int
    lines: list[dict[str, Any]]
    events: list[dict[str, Any]]


class MemoryFacts(TypedDict):
    """Main memory in bytes; `swap_rate` is in bytes per second."""

    mem_total: int | None
    mem_available: int | None
    swap_used: int | None
    swap_rate: float | None


class ProcessorFacts(TypedDict):
    """Settings of the processors; `governors` and `preferences` count the processors by setting."""

    load1: float | None
    governors: dict[str, int]
    frequency_driver: str | None
    preferences: dict[str, int]
    clocksource: str | None
    clock_error: float | None


class SharedMemorySpace(TypedDict):
    """The file system of shared memory, in bytes."""

    total: int
    free: int


class WorkerLimits(TypedDict):
    """The limits of a worker; `None` is unlimited."""

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
    shm: SharedMemorySpace | None


class EnvironmentFacts(TypedDict):
    """Variables that libraries read: harmless values in clear, and a hash of each."""

    env: dict[str, str | None]
    env_hashes: dict[str, str]


class HostFacts(MemoryFacts, ProcessorFacts, WorkerLimits, EnvironmentFacts):
    """The group `host`; `uptime` in seconds."""

    boot_id: str | None
    machine_id: str | None
    netns: str | None
    kernel: str
    arch: str
    distro: str | None
    user: str
    uptime: float | None


class MemoryErrorCount(TypedDict):
    """Memory errors that a controller has counted, in so many seconds."""

    controller: str
    corrected: int | None
    uncorrected: int | None
    seconds: int | None


class PcieErrorCounts(TypedDict):
    """Errors that a card or port has counted, by severity and kind."""

    correctable: dict[str, int]
    nonfatal: dict[str, int]
    fatal: dict[str, int]


class PcieDeviceErrors(PcieErrorCounts):
    """A card, or a port above it; `of` is the card."""

    address: str
    of: str


class HardwareErrorFacts(TypedDict):
    """The group `hardware`."""

    pcie: list[PcieDeviceErrors]
    memory: list[MemoryErrorCount]


class WriteResult(TypedDict):
    """Whether a file could be written, and why not."""

    writable: bool
    error: str | None


class DirectorySpace(TypedDict, total=False):
    """The space in a folder where a run writes; bytes."""

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


class DiskFacts(TypedDict):
    """The group `disk`."""

    paths: list[DirectorySpace]


class MountCheck(TypedDict):
    """The result of listing a mount."""

    path: str
    fs: str | None
    device: str | None
    status: str | None
    reason: str | None
    ms: float | None
    state: str | None
    wchan: str | None


class MountFacts(TypedDict):
    """The group `mounts`; `left_out` mounts were not checked."""

    paths: list[MountCheck]
    left_out: int


class CheckpointFacts(TypedDict):
    """The group `checkpoint`."""

    path: str | None
    bytes: int | None


class RunProcess(TypedDict):
    """A process with the marker of a run."""

    run: str
    pid: int
    comm: str


class SleepingProcess(TypedDict):
    """A process in state D; `gpu`: it uses a GPU. `stuck_s`: seconds in which it was not woken once."""

    pid: int
    comm: str
    wchan: str | None
    gpu: bool
    stuck_s: float | None


class ProcessFacts(TypedDict):
    """The group `procs`."""

    runs: list[RunProcess]
    dstate: list[SleepingProcess]
    zombies: int
    own_namespace: bool
    fabric_manager: bool
    time_daemon: str | None


class NcclVersion(TypedDict):
    """The NCCL that torch loads."""

    nccl: str | None
    nccl_from: str | None


class VersionFacts(NcclVersion):
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


class ResolvedName(TypedDict):
    """The addresses of a peer's name on this node."""

    name: str
    addresses: list[str]
    error: str | None


class NameFacts(TypedDict):
    """The group `names`."""

    hostname: str
    addresses: list[str]
    error: str | None
    peers: dict[str, ResolvedName]


class NetworkInterface(TypedDict):
    """A network interface; `speed` in Mbit/s."""

    name: str
    operstate: str | None
    mtu: int | None
    speed: int | None
    virtual: bool
    address: str | None


class PeerRoute(TypedDict):
    """The route to a peer."""

    address: str
    source: str | None
    interface: str | None
    error: str | None


class RdmaDevice(PcieLinkWidth):
    """An RDMA device."""

    firmware: str | None
    board: str | None
    driver: str | None
    pci: str | None


class RdmaPortState(TypedDict):
    """A port of an RDMA device, from the kernel."""

    port: int | str
    state: str | None
    phys: str | None
    rate: str | None
    link_layer: str | None
    gids: int
    roce_v2: int


class RdmaPort(RdmaDevice, RdmaPortState):
    """An RDMA port with its device."""

    device: str


class NetworkFacts(TypedDict):
    """The group `net`."""

    interfaces: list[NetworkInterface]
    routes: dict[str, PeerRoute]
    ib: list[RdmaPort]


class PortCheck(TypedDict):
    """Whether a TCP port is free here, else its user."""

    port: int
    free: bool
    error: str | None
    owner: str | None


class PortFacts(TypedDict):
    """The group `ports`."""

    ports: list[PortCheck]
