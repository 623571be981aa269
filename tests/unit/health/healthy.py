"""Facts of a healthy node, as the agent tells them, and small changes to them."""

from __future__ import annotations

import copy
from typing import Any

from clusterctl.agent.facts import gpu_reading_base, kernel_errors

GIB = 1024**3
UUID = "GPU-00000000-0000-0000-0000-0000000{node:02d}{gpu:03d}"


def device(index: int, node: int = 0) -> dict[str, Any]:
    """One GPU of a healthy node with 8 of them behind an NVSwitch."""
    return {
        "vendor": "nvidia",
        "index": index,
        "v": {
            "uuid": UUID.format(node=node, gpu=index),
            "serial": f"16500{node:02d}{index:02d}",
            "name": "NVIDIA H100 80GB HBM3",
            "pci": f"00000000:{0x10 + index:02x}:00.0",
            "subsystem": "16c110de",
            "capability": [9, 0],
            "vbios": "96.00.61.00.01",
            "minor": index,
            "recovery_action": 0,
            "util": 0,
            "memory": {"used": 5 * 1024**2, "total": 80 * GIB, "version": 2},
            "temp": 32,
            "temp_slowdown": 87,
            "temp_max": 90,
            "mem_temp": 40,
            "mem_temp_max": 95,
            "margin": 58,
            "tlimit_gpu_max": 0,
            "power_w": 70.0,
            "power_limit_w": 700.0,
            "power_default_w": 700.0,
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
            "inforom": True,
            "repair": [0, 0],
            "pcie_width": 16,
            "pcie_width_max": 16,
            "pcie_gen": 1,
            "pcie_gen_max": 5,
            "nvlinks": [1] * 18,
            "fabric": {"state": 3, "status": 0, "health": 1, "cluster": None, "clique": 0},
            "persistence": 1,
            "mig": [0, 0],
            "compute_mode": 0,
            "procs": [],
        },
        "err": {"retired_pending": "unsupported", "retired": "unsupported"},
        "codes": {"retired_pending": 3, "retired": 3},
    }


def pci(bus: int, *, minor: int | None = None, **changes: Any) -> dict[str, Any]:
    """A GPU on the PCI bus, in a slot as wide as it is."""
    entry = {"vendor": "nvidia", "class": "0x0302", "driver": "nvidia", "width": 16, "max_width": 16, "slot_width": 16}
    return {"address": f"0000:{bus:02x}:00.0", "minor": minor, **entry, **changes}


UPTIME = 900000.0


def log(*texts: str, age: float = 60.0, since: float = UPTIME) -> dict[str, Any]:
    """What the collector makes of a kernel log that holds these lines."""
    stamped = "\n".join([f"[{UPTIME - since:12.6f}] first line", *(f"[{UPTIME - age:12.6f}] {text}" for text in texts)])
    return {"source": "dmesg", "uptime": UPTIME, **kernel_errors.filter_kernel_log(stamped, uptime=UPTIME)}


def link(address: str, of: str, **counted: dict[str, int]) -> dict[str, Any]:
    """What AER has counted at a card or the port above one."""
    return {"address": address, "of": of, "correctable": {}, "nonfatal": {}, "fatal": {}, **counted}


def hca(device: str, **changes: Any) -> dict[str, Any]:
    """One port of an InfiniBand card in use."""
    return {
        "device": device,
        "port": 1,
        "state": "ACTIVE",
        "phys": "LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
        "gids": 1,
        "roce_v2": 0,
        "firmware": "28.39.1002",
        "board": "MT_0000000838",
        "driver": "mlx5_core",
        "pci": "0000:18:00.0",
        "width": 16,
        "max_width": 16,
        "slot_width": 16,
        **changes,
    }


RING = 256 * 1024


def group(data: dict[str, Any], ms: float = 50.0) -> dict[str, Any]:
    return {"status": "ok", "reason": None, "data": data, "ms": ms}


def facts(node: int = 0, gpus: int = 8) -> dict[str, Any]:
    """What a healthy node tells. Nodes differ in boot id, name, UUIDs, and nothing that matters."""
    disk = {"total": 1000 * GIB, "free": 600 * GIB, "used": 400 * GIB, "inodes": 10**8, "inodes_free": 9 * 10**7}
    pairs = [[i, j, 0, 0] for i in range(gpus) for j in range(i + 1, gpus)]
    groups = {
        "nvml": {
            "init_error": None,
            "init_ms": 20.0,
            "driver": "570.86.15",
            "nvml": "12.570.86.15",
            "cuda": 12080,
            "cuda_error": None,
            "count": gpus,
            "count_error": None,
            "uvm": "ok",
            "devices": [device(i, node) for i in range(gpus)],
            "p2p": pairs,
        },
        "driver": {
            "module": "570.86.15",
            "proc_version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15",
            "nouveau": False,
            "modules": ["nvidia", "nvidia_uvm"],
            "nvswitches": 4,
            "pci": [pci(0x10 + i, minor=i) for i in range(gpus)],
            "dev": [{"path": f"/dev/nvidia{name}", "readable": True} for name in (*range(gpus), "ctl", "-uvm")],
            "imex": [],
            "helper": True,
        },
        "kernel_log": log(),
        "host": {
            "boot_id": f"boot-{node}",
            "machine_id": f"machine-{node}",
            "netns": f"net:[{4026531840 + node}]",
            "kernel": "6.8.0-45-generic",
            "arch": "x86_64",
            "distro": "Ubuntu 24.04.1 LTS",
            "user": "train",
            "uptime": 900000.0,
            "cpus": 128,
            "cpus_allowed": 128,
            "load1": 1.5,
            "mem_total": 1024 * GIB,
            "mem_available": 1000 * GIB,
            "swap_used": 0,
            "swap_rate": 0.0,
            "governors": {"performance": 128},
            "frequency_driver": "acpi-cpufreq",
            "preferences": {},
            "clocksource": "tsc",
            "clock_error": 0.004,
            "memlock": None,
            "nofile": 1048576,
            "nproc": None,
            "cgroup_mem_max": None,
            "cgroup_mem_free": None,
            "cpu_quota": None,
            "pids_max": None,
            "pids_free": None,
            "shm": {"total": 512 * GIB, "free": 512 * GIB},
            "env": {"OMP_NUM_THREADS": "8", "NCCL_SOCKET_IFNAME": "=eth0"},
            "env_hashes": {"OMP_NUM_THREADS": "8a", "NCCL_SOCKET_IFNAME": "e0"},
        },
        "hardware": {
            "pcie": [link(f"0000:{0x10 + i:02x}:00.0", f"GPU 0000:{0x10 + i:02x}:00.0") for i in range(gpus or 1)],
            "memory": [{"controller": "mc0", "corrected": 0, "uncorrected": 0, "seconds": int(UPTIME)}],
        },
        "disk": {
            "paths": [
                {"path": "/", "what": "root", "readonly": False, "writable": None, "error": None, **disk},
                {"path": "/work", "what": "workdir", "readonly": False, "writable": True, "error": None, **disk},
            ]
        },
        "mounts": {
            "paths": [
                {"path": "/data", "fs": "nfs4", "device": "filer:/data", "status": "ok", "reason": None, "ms": 2.0}
            ],
            "left_out": 0,
        },
        "names": {
            "hostname": f"gpu{node:02d}",
            "addresses": [f"10.0.0.{node + 1}"],
            "error": None,
            "peers": {"other": {"name": "10.0.0.99", "addresses": ["10.0.0.99"], "error": None}},
        },
        "net": {
            "interfaces": [
                {
                    "name": "lo",
                    "operstate": "unknown",
                    "mtu": 65536,
                    "speed": None,
                    "virtual": True,
                    "address": "127.0.0.1",
                },
                {
                    "name": "eth0",
                    "operstate": "up",
                    "mtu": 9000,
                    "speed": 100000,
                    "virtual": False,
                    "address": "10.0.0.1",
                },
            ],
            "routes": {"other": {"source": "10.0.0.1", "interface": "eth0", "error": None}},
            "ib": [hca("mlx5_0")],
        },
        "ports": {"ports": [{"port": 29500, "free": True, "error": None, "owner": None}]},
        "procs": {
            "runs": [],
            "dstate": [],
            "zombies": 0,
            "own_namespace": False,
            "fabric_manager": True,
            "time_daemon": "chronyd",
        },
        "versions": {
            "python": "3.11.7",
            "executable": "/opt/venv/bin/python",
            "torch": "2.6.0",
            "torch_cuda": "12.4",
            "nccl": "2.21.5",
            "nccl_from": "package",
            "net_plugin": None,
            "verbs": "/lib/x86_64-linux-gnu/libibverbs.so.1",
            "packages": 120,
            "packages_hash": "0123456789abcdef",
            "names": {"torch": "2.6.0"},
        },
    }
    return {
        "schema": 1,
        "time": 1700000000.0,
        "ms": 120.0,
        "stuck": [],
        "groups": {name: group(data) for name, data in groups.items()},
        "controller": {
            "clock": {"offset": 0.002 * node, "error": 0.001},
            "rendezvous": {
                "address": "10.0.0.1",
                "port": 29500,
                "role": "connect",
                "ok": True,
                "error": None,
                "ms": 0.4,
            },
            "ring": [
                {
                    "from": f"gpu{node:02d}",
                    "to": "other",
                    "address": "10.0.0.99",
                    "port": 41234,
                    "ok": True,
                    "error": None,
                    "ms": 3.0,
                    "sent": RING,
                    "received": RING,
                    "payload": RING,
                    "still": 0.0,
                }
            ],
            "code_hash": "c0de",
            "live_runs": [],
            "connect_ms": 120.0,
        },
    }


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a copy with places set.

    `groups__host__load1=99`, `gpu3__temp=95`; `err3__temp=15` is the vendor's code in place of a value; a group to a
    text is that status, and the kernel log to texts holds these lines.
    """
    copied = copy.deepcopy(base)
    for place, value in changes.items():
        _set(copied, place, value)
    return copied


def _set(facts: dict[str, Any], place: str, value: Any) -> None:
    head, *rest = place.split("__")
    amd = facts["groups"].get("amdgpu")
    if head.startswith("gpu") and head[3:].isdigit():
        target = (amd or facts["groups"]["nvml"])["data"]["devices"][int(head[3:])]["v"]
        target[rest[0]] = value
    elif head.startswith("err") and head[3:].isdigit():
        entry = (amd or facts["groups"]["nvml"])["data"]["devices"][int(head[3:])]
        entry["v"].pop(rest[0], None)
        entry["codes"][rest[0]] = value
        words = gpu_reading_base.FILE_ERROR_NAMES if amd else gpu_reading_base.NVML_ERROR_NAMES
        entry["err"][rest[0]] = words.get(value, gpu_reading_base.FAILED)
    elif head == "controller":
        facts["controller"][rest[0]] = value
    elif not rest and isinstance(value, dict):
        facts["groups"][head] = group(value)
    elif not rest:
        facts["groups"][head] = {"status": value, "reason": f"{head} is {value}", "data": {}, "ms": 3000.0}
    else:
        target = facts["groups"][head]["data"]
        for key in rest[:-1]:
            target = target[int(key)] if isinstance(target, list) else target[key]
        last: Any = int(rest[-1]) if isinstance(target, list) else rest[-1]
        target[last] = value
