"""Machines as people own them, healthy: boards, slots, drivers, who looks, and from where that is known."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.unit.health import healthy
from tests.unit.health.machines import boards
from tests.unit.health.machines.boards import Values

OK, GNS, TNS, NS = 0, 2, 3, 5
"""NVML's statuses of a pair: well, not supported by the GPU, by the topology, at all."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One machine.

    Attributes:
        source: Where it is known from, beside what its boards say.
        gpus: The boards that NVML shows, in order.
        pairs: NVML's status of each pair over NVLink and for reading.
        driver: Version of the driver, and the CUDA that it runs.
        torch: Version of torch and the CUDA that it is built for.
        slots: Lanes of the port above each GPU; `None` where the machine does not show it.
        switches: NVSwitches on the PCI bus.
        unshown: GPUs that the PCI bus has besides: what has taken each, and how opening its device node ends.
        expect: What the cluster file promises.
        groups: Facts of other groups that differ from those of a usual machine: a status, or values.
    """

    source: str
    gpus: Sequence[Values] = ()
    pairs: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    pair: tuple[int, int] = (OK, OK)
    driver: tuple[str, int] = ("570.148.08", 12080)
    torch: tuple[str, str] = ("2.7.0", "12.6")
    slots: Sequence[int | None] = ()
    switches: int = 0
    unshown: Sequence[tuple[str | None, str | None]] = ()
    expect: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)

    def facts(self, node: int = 0) -> dict[str, Any]:
        """What a healthy machine of this shape tells."""
        facts = healthy.facts(node, gpus=0)
        groups = facts["groups"]
        version, cuda = self.driver
        groups["nvml"]["data"].update(driver=version, nvml=f"12.{version}", cuda=cuda, count=len(self.gpus))
        groups["nvml"]["data"].update(devices=self._devices(node), p2p=self._pairs())
        groups["driver"]["data"].update(module=version, nvswitches=self.switches, pci=self._pci())
        groups["driver"]["data"]["dev"] = self._nodes()
        groups["versions"]["data"].update(torch=self.torch[0], torch_cuda=self.torch[1])
        groups["procs"]["data"]["fabric_manager"] = bool(self.switches)
        if self.unshown:
            hidden = [{**entry, "node": how} for entry, (_, how) in zip(self._hidden(), self.unshown, strict=True)]
            groups["hidden_gpus"] = healthy.group({"gpus": hidden})
        if not self.gpus:
            groups["nvml"] = {"status": "absent", "reason": "no library", "data": {}, "ms": 1.0}
            groups["driver"]["data"].update(module=None, pci=[], dev=[])
        for name, change in self.groups.items():
            if isinstance(change, str):
                groups[name] = {"status": change, "reason": f"{name} is {change}", "data": {}, "ms": 1.0}
            else:
                groups[name]["data"].update(copy.deepcopy(change))
        return facts

    def _devices(self, node: int) -> list[dict[str, Any]]:
        return [boards.device(i, copy.deepcopy(v), bus=0x10 + i, node=node) for i, v in enumerate(self.gpus)]

    def _pairs(self) -> list[list[int]]:
        n = len(self.gpus)
        return [[i, j, *self.pairs.get((i, j), self.pair)] for i in range(n) for j in range(i + 1, n)]

    def _pci(self) -> list[dict[str, Any]]:
        slots = self.slots or [16] * len(self.gpus)
        shown = [healthy.pci(0x10 + i, minor=i, slot_width=slot) for i, slot in enumerate(slots)]
        return [*shown, *self._hidden()]

    def _hidden(self) -> list[dict[str, Any]]:
        first = 0x10 + len(self.gpus)
        return [
            healthy.pci(first + i, minor=None if how is None else len(self.gpus) + i, driver=driver)
            for i, (driver, how) in enumerate(self.unshown)
        ]

    def _nodes(self) -> list[dict[str, Any]]:
        closed = [i + len(self.gpus) for i, (_, how) in enumerate(self.unshown) if how not in (None, "absent")]
        names = [*range(len(self.gpus)), *closed, "ctl", "-uvm"]
        return [{"path": f"/dev/nvidia{name}", "readable": name not in closed} for name in names]


CUBE_MESH = {(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 5), (2, 3), (2, 6), (3, 7)} | {
    (4, 5), (4, 6), (4, 7), (5, 6), (5, 7), (6, 7)
}  # fmt: skip
"""Which pairs of a DGX-1V are linked: 16 of 28 (NVIDIA DGX-1 system architecture, hybrid cube mesh)."""

PLAIN_USER: dict[str, Any] = {"kernel_log": "denied"}
"""`kernel.dmesg_restrict` is 1 since Ubuntu 20.10, and a new user is not in `adm`."""
CONTAINER: dict[str, Any] = {
    "kernel_log": "absent",
    "procs": {"own_namespace": True, "fabric_manager": False},
    "driver": {"helper": False},
}
"""Own PID namespace, no `dmesg`, no setuid helper: docs.docker.com, runtime privileges."""
VM: list[int | None] = [None]
"""A virtual machine has no PCIe port above its GPUs."""


def pairs_of(good: set[tuple[int, int]], n: int, other: tuple[int, int]) -> dict[tuple[int, int], tuple[int, int]]:
    everyone = {(i, j) for i in range(n) for j in range(i + 1, n)}
    return {pair: (OK, OK) if pair in good else other for pair in everyone}


def bridged(card: Values, links: int) -> Values:
    """The card with a bridge on it."""
    return {**card, "nvlinks": [1] * links + [0] * (len(card["nvlinks"]) - links)}


OLD_V100 = {**boards.V100_SXM, **boards.BEFORE_570}
OLD_A100 = {**boards.A100_SXM, **boards.BEFORE_570}
MAKER_A = {**boards.RTX_4090, "subsystem": "40e51458", "vbios": "95.02.18.80.5f"}
MAKER_B = {**boards.RTX_4090, "subsystem": "51041462", "vbios": "95.02.3c.40.b7", "power_default_w": 480.0}
MAKER_B["power_limit_w"] = 480.0
MIG_ON = {**boards.A100_SXM, "mig": [1, 1], "util": None, "remapped": None, "rows": None, "throttle": None}
BLACKWELL = ("2.7.0", "12.8")

SHAPES: dict[str, Shape] = {
    "DGX-1V": Shape(
        source="NVIDIA DGX-1 system architecture; nccl#671 (NVLink pairs)",
        gpus=[OLD_V100] * 8,
        pairs=pairs_of(CUBE_MESH, 8, (TNS, TNS)),
        driver=("535.183.01", 12020),
    ),
    "four V100 PCIe": Shape(
        source="ucx-py#624 (topology)", gpus=[boards.V100_PCIE] * 4, pair=(NS, OK), driver=("550.54.15", 12040)
    ),
    "HGX A100": Shape(source="fabric manager guide, HGX A100", gpus=[boards.A100_SXM] * 8, switches=6),
    "four A100 PCIe without bridge": Shape(source="NVSentinel#1481", gpus=[boards.A100_PCIE] * 4, pair=(NS, OK)),
    "HGX A100 with MIG": Shape(
        source="NVIDIA MIG user guide", gpus=[MIG_ON] * 8, switches=6, pair=(NS, NS), expect={"mig": True}
    ),
    "HGX H100": Shape(source="recorded", gpus=[boards.H100] * 8, switches=4, driver=("580.105.08", 13000)),
    "H100 NVL, two of four bridged": Shape(
        source="azurehpc-health-checks#162",
        gpus=[bridged(boards.H100_NVL, 12)] * 2 + [boards.H100_NVL] * 2,
        pairs={(0, 1): (OK, OK)},
        pair=(NS, OK),
    ),
    "two H100 NVL without bridge": Shape(source="DCGM#49", gpus=[boards.H100_NVL] * 2, pair=(NS, OK)),
    "HGX H200": Shape(source="NVIDIA HGX H200 data sheet", gpus=[boards.H200] * 8, switches=4),
    "HGX B200": Shape(source="recorded", gpus=[boards.B200] * 8, driver=("580.105.08", 13000), torch=("2.9.0", "13.0")),
    "GB200 tray": Shape(
        source="recorded",
        gpus=[boards.GB200] * 4,
        driver=("580.173.02", 13000),
        torch=BLACKWELL,
        groups={
            "host": {"arch": "aarch64"},
            "driver": {"imex": [{"path": "/dev/nvidia-caps-imex-channels/channel0", "readable": True}]},
        },
    ),
    "GH200, two of them": Shape(
        source="NVIDIA GH200 data sheet; the status of the pair is assumed", gpus=[boards.GH200] * 2, pair=(NS, NS), groups={"host": {"arch": "aarch64"}}
    ),
    "two L4": Shape(source="cuda-samples#284 (peers across sockets)", gpus=[boards.L4] * 2, pair=(NS, OK)),
    "AWS g6e, L40S": Shape(
        source="recorded", gpus=[boards.L40S], slots=VM, driver=("595.91.07", 13020), torch=("2.9.0", "13.0")
    ),
    "AWS g4dn, T4": Shape(source="recorded", gpus=[boards.T4], slots=VM, driver=("595.91.07", 13020)),
    "AWS g5, four A10G": Shape(source="AWS g5", gpus=[boards.A10G] * 4, slots=VM * 4, pair=(NS, TNS)),
    "two RTX 3090 bridged, x8 slots": Shape(
        source="DCGM#49; boards that split 16 lanes", gpus=[{**bridged(boards.RTX_3090, 4), "pcie_width": 8}] * 2, slots=[8, 8]
    ),
    "two RTX 3090 without bridge": Shape(source="DCGM#49", gpus=[boards.RTX_3090] * 2, pair=(NS, TNS)),
    "two RTX 4090 of two makers": Shape(source="nccl-tests#117", gpus=[MAKER_A, MAKER_B], pair=(GNS, GNS)),
    "two RTX 5090": Shape(source="club-3090#1229 (`topo -p2p rw`: GNS)", gpus=[boards.RTX_5090] * 2, pair=(GNS, GNS), torch=BLACKWELL),
    "board with x16 and x4": Shape(
        source="consumer boards: second slot at the chipset",
        gpus=[boards.RTX_4090, {**boards.RTX_4090, "pcie_width": 4}],
        slots=[16, 4],
        pair=(GNS, GNS),
    ),
    "Slurm, two of eight": Shape(
        source="slurm.schedmd.com, cgroup.conf ConstrainDevices; DCGM#90",
        gpus=[boards.H100] * 2,
        switches=4,
        unshown=[("nvidia", "EPERM")] * 6,
        groups=PLAIN_USER,
    ),
    "Docker, two of eight": Shape(
        source="nvidia-docker#170; dcgm-exporter#178",
        gpus=[boards.H100] * 2,
        switches=4,
        unshown=[("nvidia", None)] * 6,
        groups=CONTAINER,
    ),
    "two GPUs given to a virtual machine": Shape(
        source="kernel.org, driver-api/vfio", gpus=[boards.L4] * 2, pair=(NS, OK), unshown=[("vfio-pci", None)] * 2
    ),
    "plain user on HGX H100": Shape(source="Ubuntu wiki, dmesg", gpus=[boards.H100] * 8, switches=4, groups=PLAIN_USER),
    "driver 525 on HGX A100": Shape(
        source="nvml.h of 525: no recovery action",
        gpus=[OLD_A100] * 8,
        switches=6,
        driver=("525.147.05", 12000),
        groups=PLAIN_USER,
    ),
    "driver 535 on A100 PCIe": Shape(
        source="nvml.h of 535",
        gpus=[{**boards.A100_PCIE, **boards.BEFORE_570}] * 4,
        pair=(NS, OK),
        driver=("535.183.01", 12020),
    ),
    "CPUs only": Shape(source="any", torch=("2.7.0", "12.6")),
}  # fmt: skip
