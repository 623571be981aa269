"""Of GPUs: what the kernel shows, and what the libraries of their vendors tell."""

from __future__ import annotations

from typing import Any, TypedDict


class Link(TypedDict):
    """PCIe lanes of a card: in use, at most, and of its slot."""

    width: int | None
    max_width: int | None
    slot_width: int | None


class Card(Link):
    """What has taken a card, and the number of its device node."""

    driver: str | None
    minor: int | None


Gpu = TypedDict(
    "Gpu",
    {
        "address": str, "vendor": str, "class": str, "driver": str | None, "minor": int | None,
        "width": int | None, "max_width": int | None, "slot_width": int | None,
    },
)  # fmt: skip
"""A GPU on the PCI bus."""


class Node(TypedDict):
    """A device node, and whether this user may open it."""

    path: str
    readable: bool


class Driver(TypedDict):
    """The group `driver`."""

    module: str | None
    proc_version: str | None
    nouveau: bool
    modules: list[str]
    nvswitches: int
    pci: list[Gpu]
    dev: list[Node]
    imex: list[Node]
    helper: bool


class Unshown(TypedDict):
    """The group `unshown`: GPUs of `driver.pci`, each with how opening its `node` ends."""

    gpus: list[dict[str, Any]]


class OfSmi(TypedDict):
    """A GPU as `nvidia-smi` lists it."""

    index: int
    uuid: str
    name: str
    pci: str
    driver: str


class Smi(TypedDict):
    """The group `smi`; `rc`: how the program ended."""

    rc: int
    devices: list[OfSmi]
    errors: list[str]


class Device(TypedDict, total=False):
    """What a library tells of a GPU: values by name, why others are missing in words and in its own numbers."""

    vendor: str
    index: int
    v: dict[str, Any]
    err: dict[str, str]
    codes: dict[str, int]
    odd: dict[str, int]


class NvmlSystem(TypedDict, total=False):
    """Versions, count and what opening took; `*_error` are codes of NVML."""

    init_error: int | None
    init_ms: float
    driver: str | None
    nvml: str | None
    cuda: int | None
    cuda_error: int | None
    count: int | None
    count_error: int | None


class Nvml(NvmlSystem, total=False):
    """The group `nvml`; `p2p`: `[i, j, status by NVLink, status of reading]`."""

    devices: list[Device]
    p2p: list[list[int | None]]
    uvm: str


class Access(TypedDict):
    """A device node, and how opening it ends."""

    path: str
    access: str


class Amdgpu(TypedDict):
    """The group `amdgpu`; `hidden` are kept from us by the device cgroup."""

    driver: str | None
    count: int
    hidden: int
    dev: list[Access]
    numa_balancing: int | None
    devices: list[Device]


class Holder(TypedDict, total=False):
    """A process that holds a GPU; `agent`: one that holds all of them and computes nothing."""

    pid: int
    used: int | None
    kind: str
    comm: str | None
    user: int | None
    run: str | None
    visible: bool
    agent: bool


class KernelLog(TypedDict, total=False):
    """The group `kernel_log`; `since_s`: age of its oldest line."""

    source: str
    uptime: float
    since_s: float | None
    dropped: int
    lines: list[dict[str, Any]]
    events: list[dict[str, Any]]
