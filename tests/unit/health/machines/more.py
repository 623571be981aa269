"""Further machines, healthy: unified memory, slices and virtual GPUs, drivers that answer in part, and other boards.

Unified memory: NVML answers NOT_SUPPORTED for memory, limits and power of a GB10 (nvtop#426, gpud#1170, nvitop#208), and
the agent reports the memory of the machine instead. Values of boards come from the vendors' data sheets; what NVML does
not support on them is what the issue beside them says, and otherwise assumed.
"""

from __future__ import annotations

from typing import Any

from tests.unit.health import healthy
from tests.unit.health.machines import amd, boards
from tests.unit.health.machines.amd import AmdShape
from tests.unit.health.machines.boards import GIB, NO_ECC, NO_TLIMIT, PAGES, Values, board
from tests.unit.health.machines.shapes import (
    BLACKWELL,
    CONTAINER,
    NS,
    OK,
    PLAIN_USER,
    TNS,
    VM,
    Shape,
    bridged,
)

ARM: dict[str, Any] = {"host": {"arch": "aarch64"}}
NO_POWER: Values = {"power_limit_w": None, "power_default_w": None}
NO_LIMITS: Values = {**NO_TLIMIT, "temp_max": None, "temp_slowdown": None, "mem_temp": None, "mem_temp_max": None}
NO_PCIE: Values = {"pcie_width": None, "pcie_width_max": None, "pcie_gen": None, "pcie_gen_max": None}
UNIFIED: Values = {**NO_ECC, **NO_LIMITS, **NO_POWER, "repair": None, "recovery_action": None}


def unified(name: str, capability: tuple[int, int], total: int, **values: Any) -> Values:
    """A GPU without memory of its own."""
    memory = {"used": 6 * GIB, "total": total * GIB, "version": 0}
    return {**board(name, capability, 0.0, 0), **UNIFIED, "memory": memory, **values}


GB10 = unified("NVIDIA GB10", (12, 1), 119, pcie_width=1)
NO_PLATE: Values = {**NO_PCIE, "vbios": None, "serial": None, "persistence": None}
THOR = unified("NVIDIA Thor", (11, 0), 122, **NO_PLATE)
SILENT = ("util", "temp", "power_w", "throttle", "pstate", "compute_mode", "procs", "sm_clock", "subsystem")
ORIN = unified("Orin (nvgpu)", (8, 7), 61, **NO_PLATE, **dict.fromkeys(SILENT))
VGPU: Values = {**NO_ECC, **NO_LIMITS, **NO_POWER, "temp": None, "power_w": None, "throttle": None, "repair": None}
GRID_A100 = board("GRID A100D-20C", (8, 0), 0.0, 20, **{**VGPU, **NO_PCIE, "serial": None, "vbios": None})
NVIDIA_A16 = board("NVIDIA A16-4C", (8, 6), 0.0, 4, **{**VGPU, **NO_PCIE, "serial": None, "procs": None})
SLICE = {**boards.H100, "mig": [1, 1], "util": None, "remapped": None, "rows": None, "throttle": None, "procs": None}
A100_80 = {**boards.A100_SXM, "name": "NVIDIA A100-SXM4-80GB", "memory": {"used": 0, "total": 80 * GIB, "version": 2}}
H20 = {**boards.H100, "name": "NVIDIA H20", "power_limit_w": 500.0, "power_default_w": 500.0}
GB300 = {
    **boards.GB200,
    "name": "NVIDIA GB300",
    "capability": [10, 3],
    "power_limit_w": 1400.0,
    "power_default_w": 1400.0,
}
A40 = board(
    "NVIDIA A40",
    (8, 6),
    300.0,
    48,
    **{**NO_TLIMIT, "temp_max": 88, "temp_slowdown": 95},
    nvlinks=[0] * 4,
    pcie_gen_max=4,
)
RTX_A6000 = {**A40, "name": "NVIDIA RTX A6000", "ecc_mode": [0, 0], "ecc_default": 0}
RTX_6000_ADA = board(
    "NVIDIA RTX 6000 Ada Generation", (8, 9), 300.0, 48, ecc_mode=[0, 0], ecc_default=0, pcie_gen_max=4
)
RTX_PRO = board("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 600.0, 96, ecc_mode=[1, 1])
GTX_1080 = board(
    "NVIDIA GeForce GTX 1080 Ti", (6, 1), 250.0, 11, pcie_gen_max=3,
    **{**NO_TLIMIT, **NO_ECC, "temp_max": 91, "temp_slowdown": 96, "recovery_action": None},
)  # fmt: skip
P100 = board(
    "Tesla P100-PCIE-16GB", (6, 0), 250.0, 16, pcie_gen_max=3,
    **{**NO_TLIMIT, **PAGES, "temp_max": 82, "temp_slowdown": 85},
)  # fmt: skip
LAPTOP = {**boards.RTX_4090, "name": "NVIDIA GeForce RTX 4070 Laptop GPU", "pcie_width": 8, "pcie_width_max": 8}
LAPTOP |= {**NO_POWER, "throttle": [0x5], "persistence": 1}

SHAPES: dict[str, Shape] = {
    "DGX Spark": Shape(
        source="gpud#1170, nvtop#426: memory, power and limits are NOT_SUPPORTED",
        gpus=[GB10], slots=VM, driver=("580.95.05", 13000), torch=("2.9.0", "13.0"), groups=ARM,
    ),
    "DGX Spark, Docker": Shape(
        source="dgx-spark-playbooks", gpus=[GB10], slots=VM, driver=("580.95.05", 13000), torch=("2.9.0", "13.0"),
        groups={**CONTAINER, **ARM},
    ),
    "Jetson Thor": Shape(
        source="JetPack 7: NVML answers in part", gpus=[THOR], slots=VM, driver=("580.00", 13000), torch=("2.9.0", "13.0"),
        groups={**ARM, "driver": {"pci": []}},
    ),
    "Jetson Orin": Shape(
        source="all-smi#80: name and little else", gpus=[ORIN], slots=VM, driver=("540.4.0", 12060),
        groups={**ARM, "driver": {"pci": [], "module": "540.4.0"}},
    ),
    "virtual GPU of an A100": Shape(
        source="NVIDIA vGPU user guide: no ECC, power, temperature in guests", gpus=[GRID_A100], slots=VM,
    ),
    "four virtual GPUs of an A16": Shape(
        source="NVIDIA vGPU user guide", gpus=[NVIDIA_A16] * 4, slots=VM * 4, pair=(NS, NS),
    ),
    "slice of an H100 in a container": Shape(
        source="NVIDIA MIG user guide; k8s-device-plugin", gpus=[SLICE], switches=4, expect={"mig": True},
        unshown=[("nvidia", None)] * 7, groups=CONTAINER,
    ),
    "AWS p4de": Shape(source="AWS p4de: eight A100 80GB in a virtual machine", gpus=[A100_80] * 8, slots=VM * 8, switches=6),
    "Azure ND H100 v5": Shape(source="azurehpc-health-checks", gpus=[boards.H100] * 8, slots=VM * 8, groups=PLAIN_USER),
    "HGX H20": Shape(source="NVIDIA HGX H20", gpus=[H20] * 8, switches=4),
    "GB300 tray": Shape(
        source="NVIDIA GB300 NVL72", gpus=[GB300] * 4, driver=("580.105.08", 13000), torch=("2.9.0", "13.0"),
        groups={**ARM, "driver": {"imex": [{"path": "/dev/nvidia-caps-imex-channels/channel0", "readable": True}]}},
    ),
    "eight A40": Shape(source="NVIDIA A40 data sheet", gpus=[A40] * 8, pair=(NS, OK)),
    "eight L40S": Shape(source="NVIDIA OVX", gpus=[{**boards.L40S, "pcie_width": 16}] * 8, pair=(NS, OK)),
    "two RTX A6000 bridged": Shape(source="NVIDIA RTX A6000 data sheet", gpus=[bridged(RTX_A6000, 4)] * 2),
    "four RTX 6000 Ada": Shape(source="NVIDIA RTX 6000 Ada data sheet", gpus=[RTX_6000_ADA] * 4, pair=(NS, OK)),
    "eight RTX PRO 6000": Shape(
        source="NVIDIA RTX PRO 6000 Blackwell", gpus=[RTX_PRO] * 8, pair=(NS, OK), driver=("580.105.08", 13000), torch=BLACKWELL
    ),
    "two GTX 1080 Ti": Shape(
        source="DCGM#49", gpus=[GTX_1080] * 2, pair=(NS, TNS), driver=("535.183.01", 12020), torch=("2.5.1", "12.1")
    ),
    "four P100": Shape(source="NVIDIA Tesla P100 data sheet", gpus=[P100] * 4, pair=(NS, OK), driver=("535.183.01", 12020), torch=("2.5.1", "12.1")),
    "laptop": Shape(source="nvtop#6: a mobile GPU reports no power limit", gpus=[LAPTOP], slots=[8]),
}  # fmt: skip

STRIX_VALUES: Values = {
    "util": 0, "partition": 0, "procs": [], "pcie_width": 16, "pcie_width_max": 16, "name": "AMD gfx1151 (0x1586)",
    "vbios": "113-STRXLGEN-001", "subsystem": "80f91043", "gfx": "gfx1151", "temp": 34.0, "power_w": 9.0, "sm_clock": 600,
    "xgmi": {}, "serial": None, "temp_max": None, "mem_temp": None, "mem_temp_max": None, "power_limit_w": None,
    "power_default_w": None, "ras": None, "ecc_unc": None, "ecc_cor": None, "bad_pages": None, "modes": None,
    "slowdown": None, "xgmi_links": None,
}  # fmt: skip


def strix(version: int, total: int) -> Any:
    def make(index: int, node: int) -> dict[str, Any]:
        memory = {"used": 4 * GIB if version == 0 else GIB // 2, "total": total * GIB, "version": version}
        return amd._device(index, {**STRIX_VALUES, "memory": memory}, "0000:c1:00.0", 128, node)

    return make


def mi210(index: int, node: int) -> dict[str, Any]:
    values = {
        **amd._MI250X,
        "name": "AMD Instinct MI210",
        "power_limit_w": 300.0,
        "power_default_w": 300.0,
        "xgmi": {},
        "hive": None,
    }
    return amd._device(index, values, amd.MI250X_ADDRESSES[index], 128 + index, node)


AMD_SHAPES: dict[str, AmdShape] = {
    "Strix Halo": AmdShape(
        source="kernel: amdkfd reports main memory of an APU as its own (6.10); gpustat#179",
        make=strix(0, 124),
        count=1,
    ),
    "Strix Halo, 96 GiB for graphics": AmdShape(
        source="AMD Ryzen AI Max: Variable Graphics Memory", make=strix(1, 96), count=1
    ),
    "four MI210": AmdShape(source="AMD Instinct MI210 data sheet", make=mi210, count=4),
}

Fault = tuple[dict[str, Any], tuple[str, str, int | None], str]
XID79 = "NVRM: Xid (PCI:0000:10:00): 79, pid=1, GPU has fallen off the bus."
HELD = {"used": 100 * GIB, "total": 119 * GIB, "version": 0}
FAULTS: dict[str, Fault] = {
    "DGX Spark": ({"gpu0__memory": HELD}, ("gpu.mem_used", "WARN", 0), "fuser"),
    "DGX Spark, Docker": ({"err0__temp": 15}, ("gpu.lost", "FAIL", 0), "Reboot"),
    "Jetson Thor": ({"host__mem_available": 10 * GIB}, ("host.memory", "WARN", None), ""),
    "Jetson Orin": ({"versions__torch_cuda": "13.0"}, ("version.cuda_driver", "FAIL", None), ""),
    "virtual GPU of an A100": ({"gpu0__compute_mode": 2}, ("gpu.compute_mode", "FAIL", 0), "nvidia-smi -c"),
    "four virtual GPUs of an A16": ({"err2__memory": 999}, ("gpu.lost", "FAIL", 2), ""),
    "slice of an H100 in a container": ({"gpu0__mig": [0, 0]}, ("gpu.mig_mode", "FAIL", 0), "mig"),
    "AWS p4de": ({"gpu6__remapped": [0, 2, 0, 1]}, ("gpu.remap_failure", "FAIL", 6), "replaced"),
    "Azure ND H100 v5": ({"gpu1__nvlinks": [1] * 17 + [0]}, ("gpu.nvlink", "FAIL", 1), "Reset"),
    "HGX H20": ({"gpu0__sram": {"unc": 9, "threshold": 1}}, ("gpu.sram_ecc", "FAIL", 0), "replaced"),
    "GB300 tray": ({"gpu2__recovery_action": 1}, ("gpu.recovery_action", "FAIL", 2), "nvidia-smi -r"),
    "eight A40": ({"gpu7__pcie_width": 4}, ("gpu.pcie_width", "FAIL", 7), "Reseat"),
    "eight L40S": ({"gpu3__ecc_unc": 12}, ("gpu.ecc_uncorrected", "FAIL", 3), "nvidia-smi -r"),
    "two RTX A6000 bridged": ({"gpu0__temp": 95}, ("gpu.temperature", "FAIL", 0), "fans"),
    "four RTX 6000 Ada": ({"gpu2__power_limit_w": 150.0}, ("gpu.power_cap", "WARN", 2), "-pl"),
    "eight RTX PRO 6000": ({"gpu5__ecc_mode": [0, 0]}, ("gpu.ecc_mode", "WARN", 5), "-e 1"),
    "two GTX 1080 Ti": ({"kernel_log": healthy.log(XID79)}, ("gpu.xid", "FAIL", 0), "Reboot"),
    "four P100": ({"gpu3__retired": [30, 40]}, ("gpu.retired_pages", "FAIL", 3), "replaced"),
    "laptop": ({"gpu0__temp": 95, "gpu0__margin": -3}, ("gpu.temperature", "FAIL", 0), "fans"),
    "Strix Halo": ({"gpu0__memory": HELD}, ("gpu.mem_used", "WARN", 0), "fuser"),
    "Strix Halo, 96 GiB for graphics": (
        {"amdgpu__dev": [{"path": "/dev/kfd", "access": "denied"}]}, ("gpu.device_access", "FAIL", None), "usermod",
    ),
    "four MI210": ({"gpu1__ecc_unc": 2}, ("gpu.ecc_uncorrected", "FAIL", 1), "amd-smi reset"),
}  # fmt: skip
