"""AMD's GPUs as the files of their driver tell of them when they are healthy and idle.

MI300X: temperature, power, clock, memory and limit of power of ROCm issue 4750 (legacy-rocm-build), a machine with
eight of them in SPX; limits of temperature of `amd-smi static` on an MI300A, which has the same dies; seven links to
seven peers, AMD CDNA 3 white paper.
MI250X: eight dies on four cards: RCCL `topo_8p_90a.xml` (addresses, lanes, who is linked to whom), the kernel's
`aldebaran_ppt.c` (power and its limit are told by the first die of a card alone), rocm_smi_lib issue 165 (name), an
MI210 of the same die for memory. What is in no source, as the bandwidth that KFD shows and the limits of temperature
of the MI250X, is assumed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.unit.health import healthy

Facts = dict[str, Any]
Values = dict[str, Any]

WELL = {"umc": [0, 0], "gfx": [0, 0], "sdma": [0, 0], "mmhub": [0, 0], "xgmi_wafl": [0, 0]}
NO_BAD_PAGES = {"retired": 0, "pending": 0, "failed": 0}
HIVE = "{node:08x}5ca1ab1e"

MI300X_ADDRESSES = [f"0000:{bus}:00.0" for bus in ("05", "26", "46", "65", "85", "a6", "c6", "e5")]
MI250X_ADDRESSES = [f"0000:{bus}:00.0" for bus in ("c1", "c5", "c9", "cd", "d1", "d5", "d9", "dd")]
MI250X_NEIGHBOURS = [(1, 2, 6), (0, 3, 5), (0, 3, 4), (1, 2, 7), (2, 5, 6), (1, 4, 7), (0, 4, 7), (3, 5, 6)]

_SHARED: Values = {
    "util": 0,
    "partition": 0,
    "procs": [],
    "ras": WELL,
    "ecc_unc": 0,
    "ecc_cor": 0,
    "bad_pages": NO_BAD_PAGES,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "slowdown": [],
}
_MI300X: Values = {
    **_SHARED,
    "name": "AMD Instinct MI300X OAM",
    "vbios": "113-M3000100-102",
    "subsystem": "74a11002",
    "gfx": "gfx942",
    "memory": {"used": 297771008, "total": 206141652992, "version": 1},
    "temp": 43.0,
    "temp_max": 100.0,
    "mem_temp": 37.0,
    "mem_temp_max": 105.0,
    "power_w": 134.0,
    "power_limit_w": 750.0,
    "power_default_w": 750.0,
    "sm_clock": 132,
    "modes": ["SPX", "NPS1"],
    "xgmi_links": [1] * 7,
}
_MI250X: Values = {
    **_SHARED,
    "name": "AMD Instinct MI250X/MI250",
    "vbios": "113-D65209-073",
    "subsystem": "0b0c1002",
    "gfx": "gfx90a",
    "memory": {"used": 11014144, "total": 68702699520, "version": 1},
    "temp": 35.0,
    "temp_max": 100.0,
    "mem_temp": 41.0,
    "mem_temp_max": 95.0,
    "power_w": 90.0,
    "power_limit_w": 560.0,
    "power_default_w": 560.0,
    "sm_clock": 800,
    "modes": None,
    "xgmi_links": None,
}
_OF_FIRST_DIE = ("power_w", "power_limit_w", "power_default_w")


def _device(index: int, values: Values, address: str, minor: int, node: int) -> Facts:
    own = {
        "uuid": f"GPU-1{node:07x}{index:08x}",
        "serial": f"69231{node:02d}{index:02d}",
        "pci": address,
        "minor": minor,
        "hive": HIVE.format(node=node),
    }
    everything = {**own, **copy.deepcopy(values)}
    # Links are read from the firmware's table, whose layout tells them or not: no file of theirs is missing.
    absent = [name for name, value in everything.items() if value is None and name != "xgmi_links"]
    return {
        "vendor": "amd",
        "index": index,
        "v": {name: value for name, value in everything.items() if value is not None},
        "err": dict.fromkeys(absent, "unsupported"),
        "codes": dict.fromkeys(absent, 2),
    }


def mi300x(index: int, node: int = 0, gpus: int = 8) -> Facts:
    """One of several MI300X, each linked to each."""
    links = {str(peer): [15, 64000] for peer in range(gpus) if peer != index}
    values = {**_MI300X, "xgmi": links}
    return _device(index, values, MI300X_ADDRESSES[index], 128 + 8 * index, node)


def mi250x(index: int, node: int = 0) -> Facts:
    """One die of four MI250X."""
    links = {str(p): _of_die(index, p) for p in range(8) if p != index}
    silent: Values = dict.fromkeys(_OF_FIRST_DIE) if index % 2 else {}
    return _device(index, {**_MI250X, **silent, "xgmi": links}, MI250X_ADDRESSES[index], 128 + index, node)


def _of_die(index: int, peer: int) -> list[int]:
    if peer == index ^ 1:
        return [15, 200000]
    return [15 if peer in MI250X_NEIGHBOURS[index] else 30, 50000]


def group(devices: list[Facts]) -> Facts:
    """The group of facts of a node with these GPUs."""
    nodes = ["/dev/kfd", *(f"/dev/dri/renderD{device['v']['minor']}" for device in devices)]
    return {
        "driver": "6.10.5",
        "count": len(devices),
        "hidden": 0,
        "dev": [{"path": path, "access": "ok"} for path in nodes],
        "numa_balancing": 0,
        "devices": devices,
    }


def cards(devices: Sequence[Facts]) -> list[Facts]:
    """What the PCI bus shows of them."""
    kind = "0x1200" if devices[0]["v"]["gfx"] == "gfx942" else "0x0380"
    link = {"width": 16, "max_width": 16, "slot_width": 16}
    taken = {"vendor": "amd", "class": kind, "driver": "amdgpu", "minor": None}
    return [{"address": device["v"]["pci"], **taken, **link} for device in devices]


@dataclass(frozen=True, kw_only=True)
class AmdShape:
    """One machine with AMD's GPUs; what `shapes.Shape` is for NVIDIA's."""

    source: str
    make: Callable[[int, int], Facts]
    count: int = 8
    expect: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)

    @property
    def gpus(self) -> list[Facts]:
        return [self.make(i, 0) for i in range(self.count)]

    def facts(self, node: int = 0) -> Facts:
        """What a healthy machine of this shape tells."""
        facts = healthy.facts(node, gpus=0)
        groups, devices = facts["groups"], [self.make(i, node) for i in range(self.count)]
        groups["nvml"]["data"] = {"init_error": 12, "devices": []}
        groups["amdgpu"] = healthy.group(group(devices))
        groups["driver"]["data"].update(module=None, proc_version=None, modules=["amdgpu"], nvswitches=0)
        groups["driver"]["data"].update(pci=cards(devices), dev=[], helper=False)
        groups["versions"]["data"].update(torch="2.8.0+rocm6.4", torch_cuda=None, torch_hip="6.4.43482", nccl=None)
        groups["procs"]["data"]["fabric_manager"] = False
        for name, change in self.groups.items():
            if isinstance(change, str):
                groups[name] = {"status": change, "reason": f"{name} is {change}", "data": {}, "ms": 1.0}
            else:
                groups[name]["data"].update(copy.deepcopy(change))
        return facts


SHAPES: dict[str, AmdShape] = {
    "eight MI300X": AmdShape(source="ROCm/legacy-rocm-build#4750; Primus `sysfs_probe.py`", make=mi300x),
    "four MI250X, eight dies": AmdShape(source="RCCL `topo_8p_90a.xml`", make=mi250x),
    "plain user on eight MI300X": AmdShape(
        source="Ubuntu wiki, dmesg", make=mi300x, groups={"kernel_log": "denied"}
    ),
    "one of eight MI300X in a container": AmdShape(
        source="kfd_topology.c, kfd_devcgroup_check_permission",
        make=lambda index, node: mi300x(index, node, gpus=1),
        count=1,
        groups={
            "kernel_log": "absent",
            "procs": {"own_namespace": True},
            "amdgpu": {"hidden": 7},
            "driver": {"pci": cards([mi300x(i) for i in range(8)])},
        },
    ),
}  # fmt: skip
