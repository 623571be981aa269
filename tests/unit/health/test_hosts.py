"""What a machine leaves a worker, as machines are: each row is what one tells, and all that is found on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_cluster, judge_node
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health.healthy import GIB, RING, changed, facts, hca, link, log

FAIL, WARN, PASS, SKIP, UNKNOWN = Status.FAIL, Status.WARN, Status.PASS, Status.SKIP, Status.UNKNOWN
ADVERSE: Final = (FAIL, WARN, UNKNOWN)
MIB: Final = 1024**2
TIB: Final = 1024 * GIB
BARE: Final = {"nvml": "absent", "driver__pci": [], "driver__module": None, "driver__dev": []}
"""A machine without GPUs."""


@dataclass(frozen=True)
class Row:
    """One machine.

    Attributes:
        tells: What differs from a healthy node with eight GPUs.
        found: Every adverse finding, as check and status.
        words: What one of the findings, of the checks that are looked at, says.
        gpus: How many are declared.
        workers: How many ranks are.
    """

    tells: dict[str, Any]
    found: set[tuple[str, Status]] = field(default_factory=set)
    words: str = ""
    gpus: int = 8
    workers: int | None = None


def place(what: str, path: str, free: float, total: float, **more: Any) -> dict[str, Any]:
    writable = None if what in ("root", "home") else True
    room = {"total": total, "used": total - free, "free": free, "inodes": 10**8, "inodes_free": 5 * 10**7}
    return {"path": path, "what": what, "readonly": False, "writable": writable, "error": None, **room, **more}


ROOT: Final = place("root", "/", 60 * GIB, 100 * GIB)


def disks(*places: dict[str, Any]) -> dict[str, Any]:
    return {"disk__paths": [*places]}


def saved(count: float) -> dict[str, Any]:
    return {"checkpoint": {"path": "/work/ckpt/step-100", "bytes": count}}


SPACE: Final = {
    "a file server of 100 TiB, 96 % used, with 4 TiB left": Row(
        disks(ROOT, place("workdir", "/data/me", 4 * TIB, 100 * TIB)), words="at least 60 GiB free"
    ),
    "a root file system that is as good as full": Row(
        disks(place("root", "/", 0.2 * GIB, 40 * GIB), place("workdir", "/work", 2 * TIB, 4 * TIB)),
        {("host.disk", WARN)},
        "/: 99 % full, 205 MiB free",
    ),
    "the image of a container, mounted read-only": Row(
        disks(place("root", "/", 0, 3 * GIB, readonly=True, inodes_free=0), place("workdir", "/work", TIB, 4 * TIB))
    ),
    "a home of 20 GiB with 2 GiB left": Row(
        disks(ROOT, place("home", "/home/me", 2 * GIB, 20 * GIB)), {("host.disk", WARN), ("host.readonly", UNKNOWN)}
    ),
    "a workdir with half a GiB left": Row(
        disks(ROOT, place("workdir", "/work", 0.5 * GIB, 500 * GIB)), {("host.disk", FAIL)}, "512 MiB free"
    ),
    "a workdir on a crowded disk of the machine": Row(
        disks(ROOT, place("workdir", "/work", 60 * GIB, 1000 * GIB)), {("host.disk", WARN)}, "/work: 94 % full"
    ),
    "a /tmp of 512 MiB in memory, empty": Row(
        disks(ROOT, place("tmp", "/tmp", 511 * MIB, 512 * MIB)), {("host.disk", WARN)}, "/tmp: 0 % full"
    ),
    "no room for the next checkpoint": Row(
        {**disks(ROOT, place("checkpoints", "/ckpt", 900 * GIB, 10 * TIB)), **saved(1.4 * TIB)},
        {("host.disk", FAIL)},
        "a checkpoint takes 1.4 TiB",
    ),
    "room for one checkpoint and no second": Row(
        {**disks(ROOT, place("checkpoints", "/ckpt", 2 * TIB, 10 * TIB)), **saved(1.4 * TIB)},
        {("host.disk", WARN)},
        "a checkpoint takes 1.4 TiB",
    ),
    "room for many checkpoints": Row(
        {**disks(ROOT, place("checkpoints", "/ckpt", 5 * TIB, 100 * TIB)), **saved(1.4 * TIB)}
    ),
    "a file server with few inodes in percent and many in all": Row(
        disks(ROOT, place("workdir", "/data", 4 * TIB, 9 * TIB, inodes=10**9, inodes_free=3 * 10**7))
    ),
    "a workdir without inodes": Row(
        disks(ROOT, place("workdir", "/work", 4 * TIB, 9 * TIB, inodes_free=12)), {("host.inodes", FAIL)}, "12 free"
    ),
}

ROCE: Final = {"link_layer": "Ethernet", "roce_v2": 1}
EFA: Final = {"link_layer": "Unspecified", "driver": "efa", "board": None, "gids": 1}
DARK: Final = {"state": "DOWN", "phys": "Polling"}
LOW: Final = {"host__memlock": 65536}


def env(**values: str) -> dict[str, Any]:
    hashes = {"host__env_hashes": dict.fromkeys(values, "aa")}
    return {"host__env": {"NCCL_SOCKET_IFNAME": "=eth0", **values}, **hashes}


RDMA: Final = {
    "64 KiB to pin and no RDMA card (RHEL 8, Amazon Linux 2, Docker)": Row(
        {**LOW, "net__ib": []}, words="enough without RDMA: there are no RDMA ports"
    ),
    "64 KiB to pin and a card that is down": Row({**LOW, "net__ib": [hca("mlx5_0", **DARK)]}),
    "64 KiB to pin and an EFA without its plugin": Row(
        {**LOW, "net__ib": [hca("efa_0", **EFA)]}, words="NCCL uses EFA only with the plugin"
    ),
    "64 KiB to pin and a card that NCCL_IB_HCA leaves out": Row(
        {**LOW, **env(NCCL_IB_HCA="=mlx5_7"), "net__ib": [hca("mlx5_an0", **ROCE)]},
        words="NCCL_IB_HCA==mlx5_7 selects no active port",
    ),
    "64 KiB to pin where NCCL_IB_DISABLE is set": Row({**LOW, **env(NCCL_IB_DISABLE="1")}),
    "64 KiB to pin where NCCL_NET is Socket": Row({**LOW, **env(NCCL_NET="Socket")}),
    "64 KiB to pin without libibverbs": Row({**LOW, "versions__verbs": None}, words="libibverbs is not installed"),
    "64 KiB to pin and a run on CPUs": Row({**LOW, **BARE, "versions__torch_cuda": None}, gpus=0),
    "64 KiB to pin with InfiniBand": Row(LOW, {("host.memlock", FAIL)}, "memlock 64 KiB, but NCCL would use mlx5_0/1"),
    "64 KiB to pin with an EFA and its plugin": Row(
        {**LOW, "net__ib": [hca("efa_0", **EFA)], "versions__net_plugin": "/opt/amazon/lib/libnccl-net.so"},
        {("host.memlock", FAIL)},
    ),
    "4 GiB to pin with InfiniBand": Row({"host__memlock": 4 * GIB}, {("host.memlock", WARN)}),
    "one card without a cable beside nothing": Row(
        {"net__ib": [hca("mlx5_0", **DARK)]}, words="no RDMA port is active"
    ),
    "eight rails and a storage card without a cable": Row(
        {"net__ib": [*(hca(f"mlx5_{i}") for i in range(8)), hca("mlx5_9", **DARK, board="MT_0000000359")]},
        words="8 RDMA ports active; not used: mlx5_9/1",
    ),
    "one of eight rails is dark": Row(
        {"net__ib": [hca(f"mlx5_{i}", **(DARK if i == 3 else {})) for i in range(8)]},
        {("net.ib_port", WARN)},
        "mlx5_3/1 DOWN, Polling, but most ports of the same kind of card are active",
    ),
    "one of two ports of a card is spare": Row({"net__ib": [hca("mlx5_0"), hca("mlx5_1", **DARK)]}),
    "a port with a link that no subnet manager has taken up": Row(
        {"net__ib": [hca("mlx5_0"), hca("mlx5_1", state="INIT")]}, {("net.ib_port", WARN)}, "mlx5_1/1 INIT, LinkUp"
    ),
    "a dark port that NCCL_IB_HCA names": Row(
        {**env(NCCL_IB_HCA="mlx5_0:1,mlx5_1:1"), "net__ib": [hca("mlx5_0"), hca("mlx5_1", **DARK)]},
        {("net.ib_port", FAIL)},
        "NCCL_IB_HCA names mlx5_1/1 DOWN, Polling",
    ),
    "a dark port that NCCL_IB_HCA leaves out": Row(
        {**env(NCCL_IB_HCA="^mlx5_1"), "net__ib": [hca("mlx5_0"), hca("mlx5_1", **DARK)]}
    ),
    "RoCE without an address": Row(
        {"net__ib": [hca("mlx5_0", link_layer="Ethernet")]}, {("net.roce_gid", FAIL)}, "no usable address"
    ),
    "a card in a slot of eight lanes": Row({"net__ib": [hca("mlx5_0", width=8, slot_width=8)]}),
    "a card that came up with half of its lanes": Row({"net__ib": [hca("mlx5_0", width=8)]}, {("net.ib_width", WARN)}),
}

APART: Final = {"controller__clock": {"offset": 0.9, "error": 0.01}}
CLOCK: Final = {
    "a container sees no time daemon": Row(
        {"procs__time_daemon": None}, words="the clock is synchronised, within 0.004 s"
    ),
    "chronyd keeps the clock without rtcsync": Row({"host__clock_error": 0.9}, words="is synchronised by chronyd"),
    "a virtual machine whose host keeps the clock": Row(
        {"host__clock_error": 16.0, "procs__time_daemon": None}, words="no time daemon is visible, but it agrees"
    ),
    "a daemon that has reached no server": Row(
        {"host__clock_error": 16.0, **APART}, {("host.time_daemon", WARN)}, "chronyd runs, but has not set the clock"
    ),
    "nobody keeps the clock": Row(
        {"host__clock_error": 16.0, "procs__time_daemon": None, **APART}, {("host.time_daemon", WARN)}
    ),
    "nobody keeps the clock, and the way there is slow": Row(
        {"host__clock_error": 16.0, "controller__clock": {"offset": 0.01, "error": 0.7}}, {("host.time_daemon", WARN)}
    ),
    "a kernel that does not say, with a daemon": Row({"host__clock_error": None}, words="chronyd is running"),
}

DAYS: Final = 3 * 86400.0
HOT: Final = "mce: [Hardware Error]: Machine check events logged"
KERNEL: Final = {
    "the boot lines of an Intel machine": Row(
        {"kernel_log": log("mce: CPU0: Thermal monitoring enabled (TM1)", "mce: Using 32 MCE banks")},
        words="no problem in the kernel log",
    ),
    "drives without a disk and images that are gone": Row(
        {
            "kernel_log": log(
                "blk_update_request: I/O error, dev fd0, sector 0",
                "I/O error, dev sr0, sector 0 op 0x0:(READ)",
                "I/O error, dev loop3, sector 2",
            )
        }
    ),
    "a disk with errors": Row(
        {"kernel_log": log("I/O error, dev nvme1n1, sector 9")}, {("host.kernel_log", WARN)}, "a disk has errors"
    ),
    "machine checks": Row({"kernel_log": log(HOT)}, {("host.kernel_log", WARN)}, "hardware error"),
    "a machine check of three days ago": Row({"kernel_log": log(HOT, age=DAYS)}),
    "an uncorrected machine check": Row(
        {"kernel_log": log("mce: [Hardware Error]: CPU 1: Machine Check: Uncorrected error")},
        {("host.kernel_log", FAIL)},
    ),
    "a card that lacked power at the boot, three days ago": Row(
        {"kernel_log": log("mlx5_core 0000:18:00.0: insufficient power on the PCIe slot", age=DAYS)},
        {("host.kernel_log", WARN)},
        "a PCIe card lacks power",
    ),
    "a slot with fewer lanes, as the boot tells": Row(
        {"kernel_log": log("mlx5_core: 63 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link", age=DAYS)}
    ),
}

PROCESS: Final = {
    "1024 files, which is all that the hard limit allows": Row(
        {"host__nofile": 1024}, {("host.nofile", WARN)}, "1024 open files"
    ),
    "4096 files (the hard limit of older distributions)": Row({"host__nofile": 4096}),
    "fewer files than that": Row({"host__nofile": 512}, {("host.nofile", FAIL)}),
    "processes of a user of a shared machine": Row({"host__nproc": 4096}),
    "the 2048 processes of a container of podman, eight ranks": Row(
        {"host__pids_max": 2048, "host__pids_free": 2040}, {("host.nproc", WARN)}, "2040 processes for 8 ranks by the"
    ),
    "the same with one rank": Row({"host__pids_max": 2048, "host__pids_free": 2040}, workers=1),
}

SETTLED: Final = {"host__swap_used": 40 * GIB, "host__swap_rate": 0}
INTEL: Final = {"host__frequency_driver": "intel_pstate", "host__governors": {"powersave": 128}}
SMALL: Final = {"host__shm": {"total": 64 * MIB, "free": 64 * MIB}}
MACHINE: Final = {
    "pages that were swapped out long ago": Row(SETTLED, words="40 GiB swapped out, no swapping now"),
    "a machine that swaps": Row({**SETTLED, "host__swap_rate": 90 * MIB}, {("host.swap", WARN)}, "90 MiB a second"),
    "a reboot that somebody made between runs": Row({"host__uptime": 200.0}, words="up for 0.1 h"),
    "a machine that went down under a run": Row(
        {"host__uptime": 200.0, "controller__rebooted_under": "nightly-1"},
        {("host.uptime", WARN)},
        "during run nightly",
    ),
    "a cpuset of Slurm, 16 of 128": Row({"host__cpus_allowed": 16}, words="16 of 128 CPUs for 8 ranks"),
    "a cpuset too small for its ranks": Row({"host__cpus_allowed": 8}, {("host.cpus", WARN)}),
    "a quota of 4 CPUs with all of 64 allowed": Row(
        {"host__cpus_allowed": 64, "host__cpu_quota": 4.0}, {("host.cpus", WARN)}, "time of 4 by quota for 8 ranks"
    ),
    "one CPU for one rank without a GPU": Row(
        {**BARE, "host__cpus_allowed": 1, "versions__torch_cuda": None}, gpus=0, workers=1
    ),
    "intel_pstate that leaves it to the processor": Row(
        {**INTEL, "host__preferences": {"balance_performance": 16}}, words="preference of the CPUs balance_performance"
    ),
    "intel_pstate that saves power": Row(
        {**INTEL, "host__preferences": {"power": 16}}, {("host.governor", WARN)}, "preference of the CPUs power"
    ),
    "powersave of a driver that obeys it": Row({"host__governors": {"powersave": 128}}, {("host.governor", WARN)}),
    "ondemand of a driver that obeys it": Row({"host__governors": {"ondemand": 128}}),
    "a container with 64 MiB of shared memory, eight GPUs": Row(SMALL, {("host.shm", FAIL)}, "64 MiB of shared"),
    "a container with 64 MiB of shared memory, one GPU": Row(SMALL, {("host.shm", WARN)}, workers=1),
    "4 GiB of shared memory without GPUs": Row(
        {**BARE, "host__shm": {"total": 4 * GIB, "free": 4 * GIB}, "versions__torch_cuda": None}, gpus=0, workers=8
    ),
    "a share of the memory, free": Row(
        {"host__cgroup_mem_max": 128 * GIB, "host__cgroup_mem_free": 120 * GIB},
        words="120 GiB of 128 GiB available by the control group",
    ),
    "a share of the memory, used up by others of the group": Row(
        {"host__cgroup_mem_max": 128 * GIB, "host__cgroup_mem_free": 4 * GIB}, {("host.memory", WARN)}
    ),
    "a share of the memory too small for its ranks": Row(
        {"host__cgroup_mem_max": 8 * GIB, "host__cgroup_mem_free": 8 * GIB}, {("host.memory", WARN)}, "for 8 ranks"
    ),
    "127.0.1.1 is its own name (Debian)": Row(
        {"names__addresses": ["127.0.1.1"]}, words="get their interface in a variable"
    ),
}

BUSY: Final = {"RxErr": 800_000, "BadTLP": 900_000}
ADVICE: Final = {"NonFatalErr": 10**7}
COUNTED: Final = {
    "a link with a few corrected errors": Row(
        {"hardware__pcie": [link("0000:15:01.0", "above GPU 0000:18:00.0", correctable={"BadTLP": 9, "RxErr": 30})]}
    ),
    "a link with errors all the time": Row(
        {"hardware__pcie": [link("0000:15:01.0", "above GPU 0000:18:00.0", correctable=BUSY)]},
        {("host.pcie_errors", WARN)},
        "above GPU 0000:18:00.0 (0000:15:01.0): 1700000 corrected link errors, 113 a minute",
    ),
    "advice by the million": Row({"hardware__pcie": [link("0000:18:00.0", "mlx5_0", correctable=ADVICE)]}),
    "requests that a card does not support": Row(
        {"hardware__pcie": [link("0000:18:00.0", "mlx5_0", nonfatal={"UnsupReq": 3}, fatal={"SDES": 1})]}
    ),
    "an uncorrected error": Row(
        {"hardware__pcie": [link("0000:18:00.0", "mlx5_0", nonfatal={"CmpltTO": 2})]},
        {("host.pcie_errors", WARN)},
        "mlx5_0 (0000:18:00.0): 2 CmpltTO (nonfatal)",
    ),
    "a machine that counts nothing": Row(
        {"hardware": {"pcie": [], "memory": []}}, words="does not count errors of memory"
    ),
    "memory with a few corrected errors": Row({"hardware__memory__0__corrected": 500}),
    "memory with errors all the time": Row(
        {"hardware__memory__0__corrected": 500_000},
        {("host.memory_errors", WARN)},
        "48000 corrected memory errors a day",
    ),
}

TRIED: Final = {
    "from": "n0",
    "to": "n1",
    "address": "10.0.0.2",
    "port": 41234,
    "ok": False,
    "payload": RING,
    "ms": 4000.0,
}


def way(**seen: Any) -> dict[str, Any]:
    return {"controller__ring": [{**TRIED, "sent": 0, "received": 0, "still": 0.0, "error": "timeout", **seen}]}


WAYS: Final = {
    "ports above 1023 are closed": Row(
        way(), {("net.ring", FAIL)}, "n0 to n1 at 10.0.0.2:41234: no answer: a firewall drops the packets"
    ),
    "large packets do not get there": Row(
        way(still=3.9), {("net.ring", FAIL)}, "the connection opens, but then only 0 B of 256 KiB arrived"
    ),
    "large packets do not come back": Row(
        way(sent=RING, received=1400, still=3.8), {("net.ring", FAIL)}, "only 1 KiB of 256 KiB came back"
    ),
    "a way that is slow": Row(
        way(sent=90_000, received=60_000, still=0.1), {("net.ring", WARN)}, "only 88 KiB of 256 KiB arrived in 4 s"
    ),
    "a cut in the middle": Row(
        way(error="hung up", sent=RING), {("net.ring", FAIL)}, "closed the connection during the transfer"
    ),
    "a peer that did not answer us": Row(
        {"controller__ring": [{**TRIED, "ok": None, "port": None, "ms": None, "error": "n1 was not heard: no answer"}]},
        {("net.ring", UNKNOWN)},
        "n0 to n1 could not be tried: n1 was not heard",
    ),
    "a spare alone": Row({"controller__ring": []}),
}

ROWS: Final = SPACE | RDMA | CLOCK | KERNEL | PROCESS | MACHINE | COUNTED | WAYS


def judged(row: Row) -> list[Finding]:
    nodes = {n: NodeDeclaration(gpus=row.gpus, workers=row.workers) for n in ("n0", "n1")}
    return judge_node("n0", changed(facts(), **row.tells), HealthSettings(nodes=nodes, framework="torch"))


@pytest.mark.parametrize("name", ROWS)
def test_of_each_machine_what_is_wrong_is_found_and_nothing_else(name: str) -> None:
    row = ROWS[name]
    found = judged(row)
    adverse = [f for f in found if f.status in ADVERSE]
    assert {(f.check, f.status) for f in adverse} == row.found, [f.message for f in adverse]
    told = [f.message for f in adverse or found]
    assert any(row.words in message for message in told), told
    assert all(f.hint for f in adverse if f.status is not UNKNOWN)


# --- machines beside each other

THREE: Final = ("n0", "n1", "n2")


def beside(tells: dict[str, dict[str, Any]], *checks: str, everywhere: dict[str, Any] | None = None) -> list[Finding]:
    nodes = {n: NodeDeclaration(gpus=8, env=frozenset({"NCCL_MAX_NCHANNELS"})) for n in THREE}
    told = {n: changed(facts(i), **{**(everywhere or {}), **tells.get(n, {})}) for i, n in enumerate(THREE)}
    return judge_cluster(told, HealthSettings(nodes=nodes, framework="torch"), checks)


IB: Final = ("net.ib_mixed", "net.ib_count", "net.ib_rate")


@pytest.mark.parametrize(
    ("tells", "found"),
    [
        ({}, set()),
        ({"n1": {"net__ib": []}}, {("net.ib_mixed", FAIL, "n1")}),
        ({"n1": env(NCCL_IB_DISABLE="1")}, {("net.ib_mixed", FAIL, "n1")}),
        ({"n1": {"net__ib": [hca("mlx5_0"), hca("mlx5_9")]}}, {("net.ib_count", WARN, "n1")}),
        ({"n1": {"net__ib": [hca("mlx5_0"), hca("mlx5_9", **DARK)]}}, set()),
        ({"n1": {"net__ib": [hca("mlx5_0", rate="200 Gb/sec (4X HDR)")]}}, {("net.ib_rate", WARN, "n1")}),
    ],
    ids=["alike", "none on one", "switched off on one", "a storage card more", "a dark card more", "a slower cable"],
)
def test_rdma_is_compared_by_what_nccl_would_use(
    tells: dict[str, Any], found: set[tuple[str, Status, str | None]]
) -> None:
    assert {(f.check, f.status, f.node) for f in beside(tells, *IB) if f.status in ADVERSE} == found


def test_nodes_that_all_have_sockets_alone_have_no_rdma_to_compare() -> None:
    assert {f.status for f in beside({}, *IB, everywhere={"net__ib": [hca("mlx5_0", **DARK)]})} == {SKIP}


@pytest.mark.parametrize(
    ("one", "found"),
    [
        ({"nccl": None, "nccl_from": None}, {("version.nccl", FAIL, "n1")}),
        ({"nccl": "2.27.3", "nccl_from": "/usr/lib/x86_64-linux-gnu/libnccl.so.2"}, {("version.nccl", FAIL, "n1")}),
        ({"nccl": "2.21.5", "nccl_from": "/opt/conda/lib/libnccl.so.2"}, set()),
        ({"nccl": None, "nccl_from": "/opt/site/libnccl.so"}, {("version.nccl", UNKNOWN, "n1")}),
        ({"net_plugin": "/opt/amazon/ofi-nccl/lib/libnccl-net.so"}, {("version.nccl_plugin", WARN, "n1")}),
    ],
    ids=["none", "another by the loader", "the same by conda", "a library without a version", "a plugin more"],
)
def test_the_nccl_that_would_be_loaded_is_compared(
    one: dict[str, Any], found: set[tuple[str, Status, str | None]]
) -> None:
    tells = {"n1": {f"versions__{key}": value for key, value in one.items()}}
    seen = beside(tells, "version.nccl", "version.nccl_plugin")
    assert {(f.check, f.status, f.node) for f in seen if f.status in ADVERSE} == found


def test_a_library_of_nccl_is_no_affair_of_a_run_on_cpus() -> None:
    told = {n: changed(facts(i), **BARE) for i, n in enumerate(THREE)}
    told["n1"] = changed(told["n1"], versions__nccl="2.27.3", versions__nccl_from="/usr/lib/libnccl.so.2")
    context = HealthSettings(nodes={n: NodeDeclaration(gpus=0) for n in THREE})
    assert {f.status for f in judge_cluster(told, context, ["version.nccl"])} == {SKIP}


@pytest.mark.parametrize(
    ("name", "told", "words"),
    [
        ("NCCL_P2P_DISABLE", "1", "NCCL_P2P_DISABLE is `1`, unlike on other nodes"),
        ("LD_LIBRARY_PATH", None, "LD_LIBRARY_PATH is another value, unlike on other nodes"),
        ("CUDA_VISIBLE_DEVICES", "0,1", ""),
        ("NCCL_IB_HCA", "mlx5_3", ""),
        ("NCCL_TOPO_FILE", None, ""),
        ("NCCL_MAX_NCHANNELS", "4", ""),
        ("OMP_NUM_THREADS", "3", ""),
    ],
    ids=["another setting", "a path", "its devices", "its ports", "its files", "set for one host", "no communication"],
)
def test_settings_of_nccl_cuda_and_the_loader_are_compared(name: str, told: str | None, words: str) -> None:
    changes = {f"host__env__{name}": told, f"host__env_hashes__{name}": "ff"}
    found = beside({"n1": changes}, "version.environment")
    assert [(f.status, f.node) for f in found] == ([(WARN, "n1")] if words else [(PASS, None)])
    assert words in found[0].message


def test_no_value_of_the_environment_is_shown_that_the_node_did_not_tell() -> None:
    changes = {f"n{i}": {"host__env__NCCL_X": None, "host__env_hashes__NCCL_X": str(i)} for i in range(3)}
    (found,) = beside(changes, "version.environment")
    assert found.message == ("nodes disagree on NCCL_X: another value on n0, another value on n1, another value on n2")
