"""GPUs as NVML tells of them when they are healthy and idle.

Values of the boards marked "recorded" are those of `nvidia-smi -q -x` captures of real machines in
github.com/NVIDIA/k8s-test-infra, `tests/e2e/go/assertions/nvidiasmi/testdata/hardware/` (one file a board, `qx-*.xml`);
of the others, what the source beside them says, and the vendor's data sheet for the rest.
"""

from __future__ import annotations

from typing import Any

GIB = 1024**3
Values = dict[str, Any]

_CODES = {"unsupported": 3, "denied": 4, "failed": 2}


def board(name: str, capability: tuple[int, int], watts: float, memory: int, **values: Any) -> Values:
    """A board with ECC, row remapping and the T.Limit of Ada and later, unless it is told otherwise.

    A value of `None` is one that the board does not have.
    """
    usual: Values = {
        "name": name,
        "capability": list(capability),
        "subsystem": "00000000",
        "vbios": "96.00.00.00.01",
        "recovery_action": 0,
        "util": 0,
        "memory": {"used": 0, "total": memory * GIB, "version": 2},
        "temp": 30,
        "margin": 57,
        "tlimit_gpu_max": 0,
        "tlimit_slowdown": -2,
        "tlimit_shutdown": -5,
        "tlimit_mem_max": None,
        "temp_max": None,
        "temp_slowdown": None,
        "mem_temp": None,
        "mem_temp_max": None,
        "power_w": 60.0,
        "power_limit_w": watts,
        "power_default_w": watts,
        "pstate": 0,
        "sm_clock": 345,
        "sm_clock_max": 1980,
        "throttle": [1],
        "ecc_mode": [1, 1],
        "ecc_default": 1,
        "ecc_unc": 0,
        "ecc_cor": 0,
        "ecc_unc_aggregate": 0,
        "sram": {"unc": 0, "threshold": 0},
        "remapped": [0, 0, 0, 0],
        "rows": {"max": 2560, "high": 0, "partial": 0, "low": 0, "none": 0},
        "retired": None,
        "retired_pending": None,
        "inforom": True,
        "repair": [0, 0],
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_gen": 1,
        "pcie_gen_max": 5,
        "nvlinks": None,
        "fabric": None,
        "persistence": 1,
        "mig": None,
        "compute_mode": 0,
        "procs": [],
    }
    return {**usual, **values}


NO_TLIMIT: Values = {"margin": None, "tlimit_gpu_max": None, "tlimit_slowdown": None, "tlimit_shutdown": None}
NO_ECC: Values = {
    "ecc_mode": None,
    "ecc_default": None,
    "ecc_unc": None,
    "ecc_cor": None,
    "ecc_unc_aggregate": None,
    "sram": None,
    "remapped": None,
    "rows": None,
    "repair": None,
    "inforom": None,
}
BEFORE_570: Values = {"recovery_action": None, "margin": None, "repair": None}
"""What drivers before 570 do not tell; 525 and 535 know no T.Limit fields either."""
PAGES: Values = {"remapped": None, "rows": None, "sram": None, "repair": None, "retired": [0, 0], "retired_pending": 0}
"""Before Ampere pages are retired, not rows remapped."""


def joined(links: int, **more: Any) -> Values:
    """Behind an NVSwitch, and part of its fabric."""
    fabric = {"state": 3, "status": 0, "health": 0, "cluster": None, "clique": 0}
    return {"nvlinks": [1] * links, "fabric": {**fabric, **more}}


def device(index: int, values: Values, *, bus: int, minor: int | None = None, node: int = 0) -> dict[str, Any]:
    """One GPU as the probe tells of it."""
    own = {
        "uuid": f"GPU-{node:08d}-0000-0000-0000-{index:012d}",
        "serial": f"16500{node:02d}{index:02d}",
        "pci": f"00000000:{bus:02x}:00.0",
        "minor": index if minor is None else minor,
    }
    everything = {**own, **values}
    absent = {name: "unsupported" for name, value in everything.items() if value is None}
    return {
        "vendor": "nvidia",
        "index": index,
        "v": {name: value for name, value in everything.items() if value is not None},
        "err": absent,
        "codes": {name: _CODES[word] for name, word in absent.items()},
    }


_SXM_2_OF_A100: Values = {"temp_max": 85, "temp_slowdown": 89, "mem_temp": 34, "mem_temp_max": 95, "temp": 33}
_AMPERE: Values = {**NO_TLIMIT, **_SXM_2_OF_A100, "repair": None, "mig": [0, 0], "pcie_gen_max": 4}

H100 = board(
    "NVIDIA H100 80GB HBM3",
    (9, 0),
    700.0,
    80,
    subsystem="16c110de",
    temp=29,
    margin=58,
    tlimit_shutdown=-8,
    mem_temp=37,
    tlimit_mem_max=0,
    mig=[0, 0],
    **joined(18),
)
"""Recorded (`qx-h100.xml`, driver 580.105.08)."""
H200 = {**H100, "name": "NVIDIA H200", "memory": {"used": 0, "total": 141 * GIB, "version": 2}}
"""The H100's processor with other memory: NVIDIA H200 data sheet."""
B200 = board("NVIDIA B200", (10, 0), 1000.0, 179, mem_temp=34, tlimit_mem_max=0, mig=[0, 0], **joined(18, health=1))
"""Recorded (`qx-b200.xml`, driver 580.105.08); no NVSwitch on the PCI bus: fabric manager guide, HGX B200."""
GB200 = board(
    "NVIDIA GB200",
    (10, 0),
    1200.0,
    185,
    subsystem="204610de",
    temp=27,
    margin=60,
    mem_temp=27,
    tlimit_mem_max=0,
    rows={"max": 3968, "high": 0, "partial": 0, "low": 0, "none": 0},
    mig=[0, 0],
    **joined(18, health=1, cluster="01" * 16, clique=2),
)
"""Recorded (`qx-gb200.xml`, driver 580.173.02): four GPUs of an NVL72, whose fabric reaches other machines."""
GH200 = board("NVIDIA GH200 480GB", (9, 0), 900.0, 96, mem_temp=32, tlimit_mem_max=0, mig=[0, 0], nvlinks=[0] * 18)
"""NVIDIA GH200 data sheet: only the NVL2 form joins two of them by NVLink. What NVML says of the links is assumed."""
A100_SXM = board(
    "NVIDIA A100-SXM4-40GB",
    (8, 0),
    400.0,
    40,
    subsystem="134f10de",
    rows={"max": 640, "high": 0, "partial": 0, "low": 0, "none": 0},
    nvlinks=[1] * 12,
    **_AMPERE,
)
"""Recorded (`qx-a100.xml`, driver 570.148.08): no fabric state, unlike Hopper."""
A100_PCIE = {**A100_SXM, "name": "NVIDIA A100-PCIE-40GB", "nvlinks": [0] * 12, "power_limit_w": 250.0}
A100_PCIE["power_default_w"] = 250.0
"""Twelve links that are down, not unsupported: github.com/NVIDIA/NVSentinel/pull/1481 (live A100 PCIe)."""
V100_SXM = board(
    "Tesla V100-SXM2-32GB",
    (7, 0),
    300.0,
    32,
    nvlinks=[1] * 6,
    **{**NO_TLIMIT, **PAGES},
    temp_max=83,
    temp_slowdown=87,
    pcie_gen_max=3,
)
"""NVIDIA DGX-1V user guide; retired pages: NVIDIA, dynamic page retirement."""
V100_PCIE = {**V100_SXM, "name": "Tesla V100-PCIE-16GB", "nvlinks": None, "power_limit_w": 250.0}
V100_PCIE["power_default_w"] = 250.0
H100_NVL = {
    **H100,
    "name": "NVIDIA H100 NVL",
    "nvlinks": [0] * 18,
    "fabric": None,
    "power_limit_w": 400.0,
    "power_default_w": 400.0,
}
"""Links up only where a bridge is fitted, and then 12 of 18: github.com/Azure/azurehpc-health-checks/issues/162."""
L4 = board("NVIDIA L4", (8, 9), 72.0, 24, pcie_gen_max=4)
"""The same processor family as the L40S: NVIDIA L4 data sheet."""
L40S = board(
    "NVIDIA L40S",
    (8, 9),
    350.0,
    48,
    subsystem="185110de",
    margin=59,
    temp=29,
    rows={"max": 192, "high": 0, "partial": 0, "low": 0, "none": 0},
    pcie_width=8,
    pcie_gen_max=4,
)
"""Recorded (`qx-l40s.xml`, driver 595.91.07, AWS g6e.2xlarge): 8 of 16 lanes in a virtual machine."""
T4 = board(
    "Tesla T4",
    (7, 5),
    70.0,
    16,
    subsystem="12a210de",
    **{**NO_TLIMIT, **PAGES},
    temp=33,
    temp_max=85,
    temp_slowdown=93,
    pcie_width=8,
    pcie_gen_max=3,
)
"""Recorded (`qx-t4.xml`, driver 595.91.07, AWS g4dn.xlarge): 8 of 16 lanes, no memory temperature."""
A10G = board("NVIDIA A10G", (8, 6), 300.0, 24, **{**NO_TLIMIT, "temp_max": 88, "temp_slowdown": 95}, pcie_gen_max=4)
"""AWS g5: docs.aws.amazon.com, accelerated computing instances."""
RTX_3090 = board(
    "NVIDIA GeForce RTX 3090",
    (8, 6),
    350.0,
    24,
    **{**NO_TLIMIT, **NO_ECC, "temp_max": 93, "temp_slowdown": 95},
    nvlinks=[0] * 4,
    pcie_gen_max=4,
)
"""Four links, up with a bridge; the links of cards without one are down: github.com/NVIDIA/DCGM/issues/49."""
RTX_4090 = board(
    "NVIDIA GeForce RTX 4090",
    (8, 9),
    450.0,
    24,
    **{**NO_ECC, "ecc_mode": [0, 0], "ecc_default": 0, "inforom": True},
    pcie_gen_max=4,
)
"""No access between cards, as a choice of the product: github.com/NVIDIA/nccl-tests/issues/117."""
RTX_5090 = {**RTX_4090, "name": "NVIDIA GeForce RTX 5090", "capability": [12, 0], "power_limit_w": 575.0}
RTX_5090["power_default_w"] = 575.0
