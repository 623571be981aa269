"""Every check as data: facts of a healthy node pass, one sick fact is found, and where one cannot look it says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_cluster, judge_node
from clusterctl.health.registry import CHECKS
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health.healthy import GIB, changed, facts, hca, log, pci
from tests.unit.health.machines import amd

NODES = ("n0", "n1", "n2", "n3")
SICK = "n1"


@dataclass(frozen=True)
class Case:
    """What a check is about.

    `everywhere`: what every node has, sick or not; `good`: what a healthy one has besides; `bad`: changes of one node,
    found as `worst` with `words`; `blind`: changes (of every node) that hide it.
    """

    bad: dict[str, Any]
    worst: Status
    words: str
    blind: dict[str, Any]
    gpu: int | None = None
    good: dict[str, Any] = field(default_factory=dict)
    expect: dict[str, Any] = field(default_factory=dict)
    everywhere: dict[str, Any] = field(default_factory=dict)


def every(field_name: str, code: int = 4) -> dict[str, Any]:
    """One value that NVML refuses to tell about any GPU."""
    return {f"err{gpu}__{field_name}": code for gpu in range(8)}


FAIL, WARN = Status.FAIL, Status.WARN
PLACE = {"path": "/work", "what": "workdir", "readonly": False, "writable": True, "error": None}
ROOM = {"total": 100 * GIB, "used": 10 * GIB, "free": 90 * GIB, "inodes": 1000, "inodes_free": 900}
PROC = {"pid": 4242, "used": 2 * GIB, "kind": "compute", "comm": "python", "user": 1000, "run": None, "visible": True}
PORT = {"device": "mlx5_0", "port": 1, "phys": "LinkUp", "rate": "400 Gb/sec", "gids": 1, "roce_v2": 0}
WAY = {"from": "n1", "to": "n2", "address": "10.0.0.3", "port": 41234, "ok": False, "error": "timeout", "ms": 4000}
RENDEZVOUS = {"address": "10.0.0.1", "port": 29500, "role": "connect", "ok": False, "error": "timeout", "ms": 2000}

CASES: dict[str, Case] = {
    "net.ssh": Case({}, FAIL, "refused", {"groups": "x"}),
    "version.interpreter": Case({}, FAIL, "no interpreter", {"versions": "timeout"}),
    "net.hostname_loopback": Case(
        {"names__addresses": [], "names__error": "Name or service not known"},
        WARN,
        "gpu01 does not resolve: Name or service not known",
        {"names": "timeout"},
    ),
    "net.resolve": Case(
        {"names__peers": {"other": {"name": "gpu99", "addresses": [], "error": "not known"}}},
        FAIL,
        "gpu99 (other) does not resolve",
        {"names": "timeout"},
    ),
    "net.interface": Case({"net__interfaces__1__operstate": "down"}, FAIL, "eth0 is down", {"net": "error"}),
    "net.ifname_env": Case(
        {"host__env": {"NCCL_SOCKET_IFNAME": "ib7"}},
        FAIL,
        "NCCL_SOCKET_IFNAME=ib7 names no interface",
        {"net": "error"},
    ),
    "net.ib_port": Case(
        {"net__ib__0__state": "DOWN"},
        FAIL,
        "0 of 1 RDMA ports active: mlx5_0/1 DOWN",
        {"net": "error"},
        expect={"ib_ports": 1},
    ),
    "net.ib_width": Case({"net__ib__0__width": 8}, WARN, "mlx5_0 uses 8 of 16 PCIe lanes", {"host": "error"}),
    "net.ib_count": Case(
        {"net__ib": [hca("mlx5_0"), hca("mlx5_1")]},
        WARN,
        "number of RDMA ports in use 2, 1 elsewhere",
        {"versions": "error"},
    ),
    "net.roce_gid": Case(
        {"net__ib": [{**PORT, "state": "ACTIVE", "link_layer": "Ethernet"}]},
        FAIL,
        "no usable address",
        {"net": "error"},
    ),
    "net.ib_mixed": Case({"net__ib": []}, FAIL, "uses no RDMA, others do: there are no RDMA ports", {"net": "error"}),
    "net.ib_rate": Case({"net__ib__0__rate": "200 Gb/sec"}, WARN, "200 Gb/sec", {"net": "error"}),
    "net.mtu": Case({"net__interfaces__1__mtu": 1500}, WARN, "MTU 1500, 9000 elsewhere", {"net": "error"}),
    "net.link_speed": Case({"net__interfaces__1__speed": 10000}, WARN, "link speed 10000, ", {"net": "error"}),
    "gpu.driver": Case(
        {"nvml": "ok", "nvml__init_error": 9, "nvml__devices": []}, FAIL, "driver not loaded", {"nvml": "timeout"}
    ),
    "gpu.lib_mismatch": Case({"nvml__init_error": 18}, FAIL, "driver/library version mismatch", {"nvml": "timeout"}),
    "gpu.count": Case({"nvml__count": 7}, FAIL, "7 of 8 GPUs", {"nvml": "error"}),
    "gpu.model": Case({"gpu3__name": "NVIDIA A100"}, WARN, "2 models", {"nvml": "timeout"}),
    "gpu.responsive": Case({"nvml": "timeout"}, FAIL, "NVML hangs", {"nvml": "absent"}),
    "gpu.device_access": Case(
        {"driver__dev": [{"path": "/dev/nvidia0", "readable": False}]}, FAIL, "/dev/nvidia0", {"driver__dev": []}
    ),
    "gpu.nouveau": Case({"driver__nouveau": True}, WARN, "nouveau is loaded", {"driver": "error"}),
    "gpu.lost": Case({"err3__temp": 15}, FAIL, "GPU 3 (00000000:13:00.0): GPU is lost", {"nvml": "timeout"}, gpu=3),
    "gpu.recovery_action": Case(
        {"gpu2__recovery_action": 2}, FAIL, "recommends: node reboot", every("recovery_action"), gpu=2
    ),
    "gpu.inforom": Case({"err6__inforom": 14}, FAIL, "corrupted infoROM", every("inforom"), gpu=6),
    "gpu.bad_env": Case({"host__env": {"CUDA_PROFILE": "1"}}, WARN, "CUDA_PROFILE set", {"host__env": None}),
    "gpu.xid": Case(
        {"kernel_log": log("NVRM: Xid (PCI:0000:15:00): 79, pid=1, GPU has fallen off the bus.")},
        FAIL,
        "GPU 5: XID 79, GPU has fallen off the bus, 60 s ago",
        {"kernel_log": "timeout"},
        gpu=5,
    ),
    "gpu.sxid": Case(
        {"kernel_log": log("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")},
        FAIL,
        "SXid 20034, fatal",
        {"kernel_log": "timeout"},
    ),
    "gpu.ecc_mode": Case({"gpu1__ecc_mode": [0, 0]}, WARN, "ECC is off", every("ecc_mode"), gpu=1),
    "gpu.ecc_uncorrected": Case({"gpu1__ecc_unc": 9}, FAIL, "9 uncorrected", every("ecc_unc"), gpu=1),
    "gpu.ecc_corrected": Case({"gpu1__ecc_cor": 10**8}, WARN, "corrected memory errors", every("ecc_cor"), gpu=1),
    "gpu.sram_ecc": Case({"gpu1__sram": {"unc": 9, "threshold": 1}}, FAIL, "exceed", every("sram", 6), gpu=1),
    "gpu.remap_pending": Case(
        {"gpu1__remapped": [0, 1, 1, 0], "gpu1__recovery_action": 1},
        FAIL,
        "waits for a reset",
        every("remapped"),
        gpu=1,
    ),
    "gpu.remap_failure": Case(
        {"gpu5__remapped": [0, 1, 0, 1]}, FAIL, "row remapping failed, serial", every("remapped"), gpu=5
    ),
    "gpu.remap_total": Case(
        {"gpu1__rows": {"max": 2558, "high": 0, "partial": 0, "low": 1, "none": 1}},
        WARN,
        "1 banks without a spare row, 1 with few, of 2560",
        every("rows"),
        gpu=1,
    ),
    "gpu.repair_pending": Case({"gpu1__repair": [1, 0]}, WARN, "waits for a reboot", every("repair"), gpu=1),
    "gpu.retired_pages": Case(
        {"gpu1__retired_pending": 1},
        FAIL,
        "page retirement waits",
        every("retired_pending"),
        gpu=1,
        good={f"gpu{i}__retired_pending": 0 for i in range(8)},
    ),
    "gpu.temperature": Case(
        {"gpu1__temp": 91, "gpu1__margin": -1}, FAIL, "core 91 °C, limit 90 °C", every("temp"), gpu=1
    ),
    "gpu.throttle_hw": Case(
        {"gpu1__throttle": [0x48] * 3}, WARN, "hardware thermal slowdown", every("throttle"), gpu=1
    ),
    "gpu.throttle_outlier": Case(
        {"gpu1__throttle": [0x88] * 3},
        FAIL,
        "GPU 1: slowdown hardware power brake, none on other GPUs of its board",
        {"nvml": "timeout"},
        gpu=1,
    ),
    "gpu.throttle_sw": Case(
        {"gpu1__throttle": [0x20]}, WARN, "thermal slowdown by the driver", every("throttle"), gpu=1
    ),
    "gpu.power_cap": Case(
        {"gpu1__power_limit_w": 400.0},
        WARN,
        "GPU 1: power limit 57 % of its default, 100 %",
        {"nvml": "timeout"},
        gpu=1,
    ),
    "gpu.temperature_outlier": Case(
        {"gpu1__temp": 75}, WARN, "GPU 1: 75 °C, others of its board 32 °C", {"nvml": "timeout"}, gpu=1
    ),
    "gpu.pcie_width": Case({"gpu1__pcie_width": 8}, FAIL, "8 of 16 PCIe lanes", every("pcie_width"), gpu=1),
    "gpu.nvlink": Case({"gpu1__nvlinks": [1] * 12 + [0] * 6}, FAIL, "12 of 18 NVLinks", every("nvlinks"), gpu=1),
    "gpu.fabric": Case(
        {"gpu1__fabric": {"state": 1, "status": 0, "health": 0}},
        FAIL,
        "not registered with the fabric",
        every("fabric"),
        gpu=1,
    ),
    "gpu.fabric_manager": Case(
        {"procs__fabric_manager": False, "gpu1__fabric": {"state": 1, "status": 0, "health": 0}},
        WARN,
        "no fabric manager runs",
        {"procs": "error"},
    ),
    "gpu.p2p": Case({"nvml__p2p__0": [0, 1, 6, 6]}, FAIL, "no NVLink between GPUs 0-1", {"nvml__p2p": []}),
    "gpu.p2p_outlier": Case(
        {"nvml__p2p__0": [0, 1, 5, 0]}, FAIL, "no NVLink between GPUs 0-1, unlike on other nodes", {"nvml": "timeout"}
    ),
    "gpu.imex": Case(
        {"driver__imex": []},
        WARN,
        "no IMEX channel to the GPUs of other nodes: there is none",
        {"driver": "error"},
        everywhere={
            "driver__imex": [{"path": "/dev/nvidia-caps-imex-channels/channel0", "readable": True}],
            **{
                f"gpu{i}__fabric": {"state": 3, "status": 0, "health": 1, "cluster": "01", "clique": 2}
                for i in range(8)
            },
        },
    ),
    "gpu.pcie_outlier": Case(
        {f"gpu{i}__pcie_width": 8 for i in range(8)},
        FAIL,
        "8 PCIe lanes, 16 in the same slot of other nodes",
        {"nvml": "timeout"},
        everywhere={"driver__pci": [pci(0x10 + i, slot_width=None) for i in range(8)]},
    ),
    "gpu.nvlink_outlier": Case(
        {f"gpu{i}__nvlinks": [1] * 12 for i in range(8)},
        FAIL,
        "12 NVLinks active, 18 in the same slot of other nodes",
        {"nvml": "timeout"},
    ),
    "gpu.foreign_procs": Case(
        {"gpu1__procs": [PROC]}, FAIL, "held by python 4242 (uid 1000, 2.0 GiB)", every("procs"), gpu=1
    ),
    "gpu.mem_used": Case(
        {"gpu1__memory": {"used": 3 * GIB, "total": 80 * GIB, "version": 2}},
        FAIL,
        "3.0 of 80 GiB in use by a process that is invisible to this user",
        every("memory"),
        gpu=1,
    ),
    "gpu.idle": Case({"gpu1__util": 97}, WARN, "97 % busy", every("util"), gpu=1),
    "run.leftover": Case(
        {"procs__runs": [{"run": "old-1", "pid": 77, "comm": "python"}]},
        FAIL,
        "left over by run old-1",
        {"procs": "timeout"},
    ),
    "host.stuck_procs": Case(
        {"procs__dstate": [{"pid": 8, "comm": "python", "wchan": "nv_lock", "gpu": True, "stuck_s": 5.5}]},
        FAIL,
        "python 8 holds a GPU and is stuck in nv_lock for 6 s",
        {"procs": "timeout"},
    ),
    "gpu.mig_mode": Case({"gpu1__mig": [1, 1]}, FAIL, "MIG is on", every("mig"), gpu=1),
    "gpu.compute_mode": Case({"gpu1__compute_mode": 2}, FAIL, "prohibited", every("compute_mode"), gpu=1),
    "gpu.persistence": Case({"gpu1__persistence": 0}, WARN, "persistence mode is off", every("persistence"), gpu=1),
    "host.shm": Case({"host__shm": {"total": 64 << 20, "free": 64 << 20}}, FAIL, "64 MiB", {"host__shm": None}),
    "host.memlock": Case({"host__memlock": 65536}, FAIL, "memlock 64 KiB", {"host": "error"}),
    "host.nofile": Case({"host__nofile": 256}, FAIL, "256 open files", {"host": "error"}),
    "host.nproc": Case({"host__nproc": 100}, WARN, "100 processes", {"host": "error"}),
    "host.memory": Case(
        {"host__mem_available": 10 * GIB}, WARN, "10 GiB of 1.0 TiB available", {"host__mem_total": None}
    ),
    "host.swap": Case(
        {"host__swap_used": 4 * GIB, "host__swap_rate": 30 << 20},
        WARN,
        "swapping 30 MiB a second, 4.0 GiB swapped out",
        {"host__swap_used": None},
    ),
    "host.load": Case({"host__load1": 400.0}, WARN, "load 400.0 on 128 CPUs", {"host__load1": None}),
    "host.cpus": Case({"host__cpus_allowed": 4}, WARN, "4 of 128 CPUs", {"host__cpus_allowed": None}),
    "host.governor": Case({"host__governors": {"powersave": 128}}, WARN, "powersave", {"host__governors": None}),
    "host.clocksource": Case({"host__clocksource": "hpet"}, WARN, "hpet", {"host__clocksource": None}),
    "host.uptime": Case(
        {"host__uptime": 60.0, "controller__rebooted_under": "nightly-1"},
        WARN,
        "up for 0.0 h: it went down during run nightly-1",
        {"host__uptime": None},
    ),
    "host.pcie_errors": Case(
        {"hardware__pcie__0__fatal": {"DLP": 2}},
        WARN,
        "GPU 0000:10:00.0 (0000:10:00.0): 2 DLP (fatal)",
        {"hardware": "timeout"},
    ),
    "host.memory_errors": Case(
        {"hardware__memory__0__uncorrected": 1}, WARN, "mc0: 1 uncorrected memory errors", {"hardware": "timeout"}
    ),
    "host.memory_total": Case({"host__mem_total": 900 * GIB}, WARN, "900 GiB of memory", {"host__mem_total": None}),
    "host.disk": Case(
        {"disk__paths": [{**PLACE, **ROOM, "used": 99.5 * GIB, "free": 0.5 * GIB}]},
        FAIL,
        "/work: 100 % full, 512 MiB free",
        {"disk__paths": [{**PLACE, "error": "Input/output error"}]},
    ),
    "host.inodes": Case(
        {"disk__paths": [{**PLACE, **ROOM, "inodes_free": 5}]}, FAIL, "100 % of inodes", {"disk": "timeout"}
    ),
    "host.readonly": Case(
        {"disk__paths": [{**PLACE, **ROOM, "writable": False, "error": "Permission denied"}]},
        FAIL,
        "/work cannot be written: Permission denied",
        {"disk": "timeout"},
    ),
    "host.mounts": Case(
        {"mounts__paths__0__status": "timeout", "mounts__paths__0__reason": "no answer within 2.6 s"},
        FAIL,
        "/data (nfs4) hangs",
        {"mounts": "error"},
    ),
    "host.kernel_log": Case(
        {"kernel_log": log("EXT4-fs (sda1): Remounting filesystem read-only")},
        FAIL,
        "remounted read-only",
        {"kernel_log": "timeout"},
    ),
    "net.port_free": Case(
        {
            "ports__ports": [
                {"port": 29500, "free": False, "error": "Address already in use", "owner": "a listener of uid 7"}
            ]
        },
        FAIL,
        "port 29500 is in use by a listener of uid 7",
        {"ports": "error"},
    ),
    "net.rendezvous": Case(
        {"controller__rendezvous": RENDEZVOUS}, FAIL, "a firewall drops the packets", {"controller__rendezvous": None}
    ),
    "net.ring": Case(
        {"controller__ring": [WAY]},
        FAIL,
        "n1 to n2 at 10.0.0.3:41234: no answer: a firewall drops the packets",
        {"controller__ring": None},
    ),
    "cluster.unique": Case(
        {"gpu0__uuid": facts(0)["groups"]["nvml"]["data"]["devices"][0]["v"]["uuid"]},
        FAIL,
        "is declared by n0, n1",
        {"host": "error"},
    ),
    "cluster.hostnames": Case({"names__hostname": "gpu00"}, WARN, "n0, n1 are all named gpu00", {"names": "error"}),
    "net.clock_skew": Case(
        {"controller__clock": {"offset": 5.0, "error": 0.01}}, WARN, "clock 5.0 s ahead", {"controller__clock": None}
    ),
    "host.time_daemon": Case(
        {"host__clock_error": 16.0, "procs__time_daemon": None, "controller__clock": {"offset": 0.9, "error": 0.01}},
        WARN,
        "no time daemon",
        {"host": "error"},
    ),
    "version.expected": Case(
        {"versions__torch": "2.5.1"},
        FAIL,
        "torch 2.5.1, expected 2.6.*",
        {"versions": "timeout"},
        expect={"torch": "2.6.*"},
    ),
    "version.python": Case(
        {"versions__python": "3.12.1"}, FAIL, "Python 3.12, 3.11 elsewhere", {"versions": "timeout"}
    ),
    "version.torch": Case({"versions__torch": None}, FAIL, "torch absent, 2.6.0 elsewhere", {"versions": "timeout"}),
    "version.cuda": Case({"versions__torch_cuda": "11.8"}, FAIL, "11.8, 12.4 elsewhere", {"versions": "timeout"}),
    "version.nccl": Case({"versions__nccl": "2.20.5"}, FAIL, "2.20.5, 2.21.5 elsewhere", {"versions": "timeout"}),
    "version.nccl_plugin": Case(
        {"versions__net_plugin": None},
        WARN,
        "network plugin of NCCL absent, libnccl-net.so elsewhere",
        {"versions": "timeout"},
        everywhere={"versions__net_plugin": "/opt/amazon/ofi-nccl/lib/libnccl-net.so"},
    ),
    "version.environment": Case(
        {"host__env_hashes__NCCL_ALGO": "11", "host__env__NCCL_ALGO": "Ring"},
        WARN,
        "NCCL_ALGO is `Ring`, unlike on other nodes",
        {"host": "error"},
    ),
    "version.packages": Case(
        {"versions__packages_hash": "ff"}, WARN, "ff, 0123456789abcdef elsewhere", {"versions": "timeout"}
    ),
    "version.driver": Case({"nvml__driver": "535.183.01"}, WARN, "535, 570 elsewhere", {"nvml": "timeout"}),
    "version.driver_minor": Case({"nvml__driver": "570.86.10"}, WARN, "570.86.10, 570.86.15", {"nvml": "timeout"}),
    "version.gpu_model": Case(
        {f"gpu{i}__name": "NVIDIA A100" for i in range(8)},
        WARN,
        "GPU model NVIDIA A100, NVIDIA H100",
        {"nvml": "timeout"},
    ),
    "version.kernel": Case({"host__kernel": "5.15.0"}, WARN, "kernel 5.15.0, 6.8.0", {"host": "error"}),
    "version.arch": Case({"host__arch": "aarch64"}, WARN, "aarch64, x86_64", {"host": "error"}),
    "version.vbios": Case({"gpu1__vbios": "95"}, WARN, "GPU 1: VBIOS 95", {"nvml": "timeout"}, gpu=1),
    "version.code": Case(
        {"controller__code_hash": "dead"}, FAIL, "code dead, c0de elsewhere", {"controller__code_hash": None}
    ),
    "version.framework": Case(
        {"versions__names": {}}, FAIL, "no torch in /opt/venv/bin/python", {"versions": "timeout"}
    ),
    "version.gpu_build": Case(
        {"versions__torch_cuda": None, "versions__torch": "2.13.0+cpu"},
        FAIL,
        "torch 2.13.0+cpu is built for CPUs only, but 8 GPUs are declared",
        {"versions": "timeout"},
    ),
    "version.cuda_driver": Case(
        {"versions__torch_cuda": "13.0", "versions__torch": "2.9.0"},
        FAIL,
        "torch 2.9.0 is built for CUDA 13.0, driver 570.86.15 runs CUDA up to 12.8",
        {"nvml": "timeout"},
    ),
}


RAS_LINE = "amdgpu 0000:26:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block"
SLOW_PAIR = {"1": [15, 32000], **{str(peer): [15, 64000] for peer in range(2, 8)}}
CASES |= {
    "gpu.vendor": Case(
        {"nvml__devices": [], "driver__pci": [{**pci(0x10), "vendor": "ascend", "class": "0x1200"}]},
        WARN,
        "1 GPU of Huawei Ascend",
        {"driver": "timeout"},
    ),
    "gpu.driver_log": Case(
        {"kernel_log": log(RAS_LINE)}, FAIL, "GPU 1: uncorrected errors in umc", {"kernel_log": "timeout"}, gpu=1
    ),
    "gpu.bad_pages": Case(
        {"gpu5__bad_pages": {"retired": 0, "pending": 0, "failed": 1}},
        FAIL,
        "1 bad memory pages are still in use",
        every("bad_pages", 13),
        gpu=5,
    ),
    "gpu.slowdown": Case(
        {"gpu5__slowdown": ["memory temperature"]}, WARN, "memory temperature", {"amdgpu": "timeout"}, gpu=5
    ),
    "gpu.xgmi": Case({"gpu5__xgmi_links": [1] * 6 + [0]}, FAIL, "6 of 7 XGMI links up", {"amdgpu": "timeout"}, gpu=5),
    "gpu.xgmi_outlier": Case({"gpu0__xgmi": SLOW_PAIR}, FAIL, "GPUs 0-1 are slower", {"amdgpu": "timeout"}),
    "gpu.partition": Case({"gpu5__modes": ["CPX", "NPS1"]}, WARN, "partition CPX/NPS1", {"amdgpu": "timeout"}, gpu=5),
    "gpu.numa_balancing": Case({"amdgpu__numa_balancing": 1}, WARN, "is on", {"amdgpu__numa_balancing": None}),
    "gpu.visible_env": Case(
        {"host__env": {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0,1"}},
        FAIL,
        "but ROCR_VISIBLE_DEVICES only",
        {"host": "timeout"},
    ),
}


def base(name: str, node: int) -> dict[str, Any]:
    """Facts of a healthy node whose GPUs the check knows."""
    return facts(node) if "nvidia" in CHECKS[name].vendors else amd.SHAPES["eight MI300X"].facts(node)


def judged(name: str, changes: dict[str, Any], expect: dict[str, Any], *, all_nodes: bool = False) -> list[Finding]:
    context = HealthSettings(nodes={node: NodeDeclaration(gpus=8) for node in NODES}, expect=expect, framework="torch")
    told = {node: changed(base(name, i), **CASES[name].everywhere) for i, node in enumerate(NODES)}
    for node in NODES if all_nodes else (SICK,):
        told[node] = changed(told[node], **changes)
    if name == "net.ssh" and not all_nodes and changes is CASES[name].bad:
        told[SICK] = {"unreachable": "connection refused"}
    if name == "version.interpreter" and changes is CASES[name].bad:
        told[SICK] = {"unprobed": "no interpreter `/nope` on this node", "there": "/usr/bin/python3 (3.11.2)"}
    if name == "net.ssh" and all_nodes:
        told[SICK].pop("groups")
    if CHECKS[name].cluster_judge is not None:
        return judge_cluster(told, context, [name])
    return judge_node(SICK, told[SICK], context, [name])


@pytest.mark.parametrize("name", ["docker0", "br-1f", "cni0", "tunl0", "kube-ipvs0", "vnet3", "virbr0"])
def test_a_route_to_a_peer_by_an_interface_that_workers_never_choose_is_told(name: str) -> None:
    (found, *_) = judged("net.interface", {"net__routes__other__interface": name}, {})

    assert (found.status, found.message) == (WARN, f"to other: over the container interface {name}")


@pytest.mark.parametrize(("name", "told"), [("net.resolve", "1 peer resolves"), ("net.interface", "1 peer over ")])
def test_one_peer_is_told_as_one(name: str, told: str) -> None:
    (found,) = judged(name, {}, {})

    assert (found.status, found.message[: len(told)]) == (Status.PASS, told)


def test_every_check_of_the_registry_has_its_three_cases() -> None:
    assert set(CASES) == {name for name in CHECKS if not name.startswith("deep.")}  # Those: deep/test_comparison.py


@pytest.mark.parametrize("name", CASES)
def test_healthy_facts_pass(name: str) -> None:
    found = judged(name, dict(CASES[name].good), CASES[name].expect)
    assert [finding.status for finding in found] == [Status.PASS], found


@pytest.mark.parametrize("name", CASES)
def test_a_sick_fact_is_found_and_named(name: str) -> None:
    case = CASES[name]
    found = [f for f in judged(name, case.bad, case.expect) if f.status in (FAIL, WARN)]
    assert found
    assert {finding.status for finding in found} == {case.worst}
    assert any(case.words in finding.message for finding in found), [finding.message for finding in found]
    assert all(finding.hint for finding in found)
    assert case.gpu is None or [finding.gpu for finding in found] == [case.gpu]
    if not name.startswith("cluster."):
        assert {finding.node for finding in found} == {SICK}
    if case.worst is FAIL:
        assert CHECKS[name].severity == "FAIL"


@pytest.mark.parametrize("name", CASES)
def test_where_one_cannot_look_the_answer_is_unknown(name: str) -> None:
    found = judged(name, CASES[name].blind, CASES[name].expect, all_nodes=True)
    assert found
    assert {finding.status for finding in found} == {Status.UNKNOWN}, found


@pytest.mark.parametrize("name", [name for name, check in CHECKS.items() if check.gpu or name.startswith("gpu.")])
def test_a_node_without_gpus_and_none_declared_is_skipped(name: str) -> None:
    bare = changed(facts(), nvml="absent", driver__pci=[], driver__module=None)
    context = HealthSettings(nodes={"n0": NodeDeclaration(gpus=None)})
    found = judge_node("n0", bare, context, [name]) + judge_cluster({"n0": bare}, context, [name])
    assert {finding.status for finding in found} == {Status.SKIP}, found
