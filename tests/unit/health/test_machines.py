"""Every shape of machine is well when it is well, by itself and beside its like; and one real fault of each is named."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_cluster, judge_node, verdict
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health import healthy
from tests.unit.health.healthy import changed, log
from tests.unit.health.machines import amd, more, shapes
from tests.unit.health.machines.shapes import MAKER_A, Shape

FAIL, WARN, PASS, SKIP, UNKNOWN = Status.FAIL, Status.WARN, Status.PASS, Status.SKIP, Status.UNKNOWN
ADVERSE = (FAIL, WARN, UNKNOWN)
SHAPES: dict[str, Any] = {**shapes.SHAPES, **amd.SHAPES, **more.SHAPES, **more.AMD_SHAPES}
Found = set[tuple[str, str, Status, int | None]]


def judged(told: dict[str, dict[str, Any]], shape: Any) -> list[Finding]:
    nodes = {node: NodeDeclaration(gpus=len(shape.gpus)) for node in told}
    context = HealthSettings(nodes=nodes, expect=shape.expect, framework="torch")
    single = [finding for node, facts in told.items() for finding in judge_node(node, facts, context)]
    return single + judge_cluster(told, context)


def adverse(findings: list[Finding]) -> Found:
    return {(f.check, f.node or "", f.status, f.gpu) for f in findings if f.status in ADVERSE}


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_a_healthy_machine_of_any_shape_gives_cause_for_nothing(name: str, nodes: int) -> None:
    shape = SHAPES[name]
    found = judged({f"n{i}": shape.facts(i) for i in range(nodes)}, shape)
    assert adverse(found) == set(), [f.message for f in found if f.status in ADVERSE]
    assert verdict(found, strict=True) is PASS


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.gpus])
def test_what_is_not_declared_is_judged_by_what_is_given(name: str) -> None:
    shape = SHAPES[name]
    context = HealthSettings(nodes={"n": NodeDeclaration()}, expect=shape.expect, framework="torch")
    found = judge_node("n", shape.facts(), context)
    assert [f.message for f in found if f.status in ADVERSE] == []
    assert sum(f.status is PASS for f in found if f.check.startswith("gpu.")) >= 8


def test_there_are_fifty_shapes() -> None:
    assert len(SHAPES) >= 50


def test_every_shape_says_where_it_is_known_from() -> None:
    assert all(shape.source for shape in SHAPES.values())


# --- one real fault each

XID79 = "NVRM: Xid (PCI:0000:10:00): 79, pid=1, GPU has fallen off the bus."
APART = {"state": 1, "status": 0, "health": 0, "cluster": None, "clique": 0}
SPENT = {"max": 190, "high": 0, "partial": 0, "low": 0, "none": 2}
NO_PAIR = [[i, j, 6, 6] for i in range(8) for j in range(i + 1, 8)]
NO_UVM = [{"path": f"/dev/nvidia{name}", "readable": True} for name in (0, 1, "ctl")]
NO_LIMIT = {"gpu3__margin": None, "gpu3__temp_max": None, "gpu3__temp_slowdown": None, "gpu3__mem_temp_max": None}

FAULTS: dict[str, tuple[dict[str, Any], tuple[str, Status, int | None], str]] = {
    "DGX-1V": ({"gpu3__retired": [4, 58]}, ("gpu.retired_pages", FAIL, 3), "replaced"),
    "four V100 PCIe": ({"gpu1__retired_pending": 1}, ("gpu.retired_pages", FAIL, 1), "nvidia-smi -r"),
    "HGX A100": ({"gpu5__nvlinks": [1] * 11 + [0]}, ("gpu.nvlink", FAIL, 5), "Reset"),
    "four A100 PCIe without bridge": ({"gpu2__pcie_width": 8}, ("gpu.pcie_width", FAIL, 2), "Reseat"),
    "HGX A100 with MIG": ({"gpu4__mig": [0, 1]}, ("gpu.mig_mode", FAIL, 4), "-mig 0"),
    "HGX H100": ({"gpu6__fabric": APART}, ("gpu.fabric", FAIL, 6), "fabricmanager"),
    "H100 NVL, two of four bridged": ({"gpu3__temp": 88, "gpu3__margin": -1}, ("gpu.temperature", FAIL, 3), "fans"),
    "two H100 NVL without bridge": ({"gpu1__recovery_action": 1}, ("gpu.recovery_action", FAIL, 1), "nvidia-smi -r"),
    "HGX H200": ({"nvml__p2p": NO_PAIR}, ("gpu.p2p", FAIL, None), "fabric manager"),
    "HGX B200": ({"gpu2__nvlinks": [0] * 18}, ("gpu.nvlink", FAIL, 2), "Reset"),
    "GB200 tray": ({"versions__torch_cuda": "12.6"}, ("version.cuda_driver", FAIL, 0), "Install"),
    "GH200, two of them": ({"gpu1__remapped": [0, 1, 0, 1]}, ("gpu.remap_failure", FAIL, 1), "replaced"),
    "two L4": ({"err0__temp": 15}, ("gpu.lost", FAIL, 0), "Reboot"),
    "AWS g6e, L40S": ({"gpu0__rows": SPENT}, ("gpu.remap_total", WARN, 0), "replacement"),
    "AWS g4dn, T4": ({"gpu0__temp": 86}, ("gpu.temperature", FAIL, 0), "fans"),
    "AWS g5, four A10G": ({"gpu2__ecc_mode": [0, 0]}, ("gpu.ecc_mode", WARN, 2), "-e 1"),
    "two RTX 3090 bridged, x8 slots": ({"gpu1__pcie_width": 4}, ("gpu.pcie_width", FAIL, 1), "Reseat"),
    "two RTX 3090 without bridge": ({"kernel_log": log(XID79)}, ("gpu.xid", FAIL, 0), "Reboot"),
    "two RTX 4090 of two makers": ({"versions__torch_cuda": "13.0"}, ("version.cuda_driver", FAIL, None), "580"),
    "two RTX 5090": ({"versions__torch_cuda": "12.4"}, ("version.cuda_driver", FAIL, 0), "Install"),
    "board with x16 and x4": ({"gpu1__pcie_width": 1}, ("gpu.pcie_width", FAIL, 1), "Reseat"),
    "Slurm, two of eight": ({"nvml__uvm": "EPERM"}, ("gpu.device_access", FAIL, None), "open the device files"),
    "Docker, two of eight": ({"driver__dev": NO_UVM}, ("gpu.device_access", FAIL, None), "nvidia-modprobe -u"),
    "two GPUs given to a virtual machine": (
        {"hidden_gpus": {"gpus": [healthy.pci(0x12, minor=2, node="EIO")]}},
        ("gpu.count", WARN, None),
        "kernel log",
    ),
    "plain user on HGX H100": ({"gpu3__recovery_action": 2}, ("gpu.recovery_action", FAIL, 3), "Reboot"),
    "driver 525 on HGX A100": ({"gpu3__ecc_unc": 9}, ("gpu.ecc_uncorrected", FAIL, 3), "nvidia-smi -r"),
    "eight MI300X": (
        {"gpu2__xgmi_links": [1] * 6 + [0]},
        ("gpu.xgmi", FAIL, 2),
        "GPUs 0, 1, 2, 3, 4, 5, 6, 7 together",
    ),
    "four MI250X, eight dies": (
        {"gpu5__bad_pages": {"retired": 8, "pending": 8, "failed": 0}},
        ("gpu.bad_pages", FAIL, 5),
        "GPUs 0, 1, 2, 3, 4, 5, 6, 7 together",
    ),
    "plain user on eight MI300X": ({"gpu3__ecc_unc": 1}, ("gpu.ecc_uncorrected", FAIL, 3), "amd-smi reset"),
    "one of eight MI300X in a container": (
        {"amdgpu__dev": [{"path": "/dev/kfd", "access": "ok"}, {"path": "/dev/dri/renderD128", "access": "denied"}]},
        ("gpu.device_access", FAIL, None),
        "usermod -aG render",
    ),
    "driver 535 on A100 PCIe": ({**NO_LIMIT, "gpu3__temp": 101}, ("gpu.temperature", UNKNOWN, 3), ""),
    **{
        name: (changes, (check, Status(status), gpu), remedy)
        for name, (changes, (check, status, gpu), remedy) in more.FAULTS.items()
    },
}


def test_every_shape_with_gpus_has_a_fault() -> None:
    assert set(FAULTS) == {name for name, shape in SHAPES.items() if shape.gpus}


@pytest.mark.parametrize("name", FAULTS)
def test_one_real_fault_of_each_shape_is_named_with_its_remedy_and_no_other_node_is(name: str) -> None:
    shape, (changes, (check, status, gpu), remedy) = SHAPES[name], FAULTS[name]
    found = judged({"n0": shape.facts(0), "n1": changed(shape.facts(1), **changes)}, shape)
    blamed = [f for f in found if f.status in ADVERSE and f.node]
    assert (check, "n1", status, gpu) in adverse(found), [(f.check, f.message) for f in blamed]
    assert {f.node for f in blamed} == {"n1"}
    assert all(remedy in str(f.hint) for f in blamed if f.check == check and f.gpu == gpu), [f.hint for f in blamed]


# --- design or damage


def two(shape: Any, **changes: Any) -> list[Finding]:
    return judged({"n0": shape.facts(0), "n1": changed(shape.facts(1), **changes)}, shape)


def test_a_link_that_is_down_on_one_of_two_nodes_is_named_by_the_slot() -> None:
    found = two(SHAPES["H100 NVL, two of four bridged"], gpu1__nvlinks=[1] * 11 + [0] * 7)
    assert adverse(found) == {("gpu.nvlink_outlier", "n1", FAIL, 1)}


def test_a_bridge_that_has_come_off_one_pair_of_one_node_is_named() -> None:
    shape = Shape(source="made up", gpus=[SHAPES["H100 NVL, two of four bridged"].gpus[0]] * 4)
    none = {f"gpu{i}__nvlinks": [0] * 18 for i in (0, 1)}
    assert adverse(two(shape, **none)) == {("gpu.nvlink_outlier", "n1", FAIL, i) for i in (0, 1)}


def test_a_node_on_which_nobody_has_fitted_a_bridge_is_slower_and_not_broken() -> None:
    shape = SHAPES["two RTX 3090 bridged, x8 slots"]
    none = {f"gpu{i}__nvlinks": [0] * 4 for i in (0, 1)}
    assert adverse(two(shape, **none)) == {("gpu.nvlink_outlier", "n1", WARN, i) for i in (0, 1)}


def test_a_pair_that_lost_its_access_on_one_of_three_nodes_is_named() -> None:
    shape = SHAPES["DGX-1V"]
    broken = changed(shape.facts(2), nvml__p2p__0=[0, 1, 3, 3])
    found = judged({"n0": shape.facts(0), "n1": shape.facts(1), "n2": broken}, shape)
    assert adverse(found) == {("gpu.p2p_outlier", "n2", FAIL, None)}


def test_lanes_that_no_slot_explains_are_held_against_the_same_slot_of_other_nodes() -> None:
    shape = SHAPES["AWS g5, four A10G"]
    told = {f"n{i}": shape.facts(i) for i in range(3)}
    odd = judged({**told, "n1": changed(told["n1"], gpu2__pcie_width=4)}, shape)
    assert adverse(odd) == {("gpu.pcie_outlier", "n1", FAIL, 2)}
    assert adverse(two(shape, gpu2__pcie_width=4)) == {("gpu.pcie_outlier", "n1", WARN, 2)}


@pytest.mark.parametrize(("links", "status"), [(12, FAIL), (0, PASS)])
def test_promised_links_are_judged_whatever_is_fitted(links: int, status: Status) -> None:
    context = HealthSettings(nodes={"n": NodeDeclaration(gpus=4)}, expect={"nvlinks": links})
    facts = SHAPES["four A100 PCIe without bridge"].facts()
    assert {f.status for f in judge_node("n", facts, context, ["gpu.nvlink"])} == {status}


def test_a_card_that_is_capped_alone_is_named_and_a_cap_on_all_is_nobodys_fault() -> None:
    shape = Shape(source="made up", gpus=[MAKER_A] * 3, pair=(2, 2))
    assert adverse(two(shape, gpu1__power_limit_w=300.0)) == {("gpu.power_cap", "n1", WARN, 1)}
    capped = {f"gpu{i}__power_limit_w": 300.0 for i in range(3)}
    told = {f"n{i}": changed(shape.facts(i), **capped) for i in range(2)}
    assert adverse(judged(told, shape)) == set()


# --- subsets


@pytest.mark.parametrize(
    ("name", "words", "hint"),
    [
        ("Slurm, two of eight", "the device cgroup denies access", "Ask the scheduler"),
        ("Docker, two of eight", "it has no device file", "Ask the scheduler"),
        ("two GPUs given to a virtual machine", "bound to vfio-pci", "nvidia driver"),
    ],
)
def test_gpus_that_are_declared_and_not_given_are_told_apart_from_broken_ones(name: str, words: str, hint: str) -> None:
    context = HealthSettings(nodes={"n": NodeDeclaration(gpus=8)})
    (found,) = judge_node("n", SHAPES[name].facts(), context, ["gpu.count"])
    assert (found.status, found.action) == (FAIL, "FIX_CONFIG")
    assert words in found.message
    assert hint in str(found.hint)


@pytest.mark.parametrize(("kind", "status"), [("0x0302", FAIL), ("0x0300", PASS)], ids=["3D controller", "display"])
def test_a_card_without_display_that_no_driver_has_taken_is_a_fault(kind: str, status: Status) -> None:
    entry = healthy.pci(0x18, driver=None, node=None, **{"class": kind})
    told = changed(SHAPES["HGX H100"].facts(), hidden_gpus={"gpus": [entry]})
    (found,) = judge_node("n", told, HealthSettings(nodes={"n": NodeDeclaration()}), ["gpu.count"])
    assert found.status is status


# --- memory, who holds it, and processes


def holder(kind: str, comm: str, *, agent: bool = False) -> dict[str, Any]:
    who = {"comm": comm, "user": 0, "run": None, "visible": True, "agent": agent}
    return {"pid": 1, "used": 3 << 30, "kind": kind, **who}


@pytest.mark.parametrize(
    ("holders", "status"),
    [
        ([holder("graphics", "Xorg")], WARN),
        ([holder("compute", "nvidia-cuda-mps", agent=True)], PASS),
        ([holder("compute", "python")], FAIL),
        ([], FAIL),
    ],
    ids=["desktop", "MPS server", "somebody's program", "nobody to be seen"],
)
def test_memory_that_a_desktop_or_a_service_holds_stops_no_run(holders: list[Any], status: Status) -> None:
    memory = {"used": 3 << 30, "total": 24 << 30, "version": 2}
    told = changed(SHAPES["two RTX 4090 of two makers"].facts(), gpu0__memory=memory, gpu0__procs=holders)
    found = judge_node("n", told, HealthSettings(nodes={"n": NodeDeclaration(gpus=2)}), ["gpu.mem_used"])
    assert {f.status for f in found} == {status}


@pytest.mark.parametrize(("stuck", "status"), [(None, PASS), (5.2, FAIL)], ids=["is woken", "is never woken"])
def test_a_process_that_reads_its_data_is_not_stuck(stuck: float | None, status: Status) -> None:
    entry = {"pid": 7, "comm": "python", "wchan": "rpc_wait", "gpu": True, "stuck_s": stuck}
    told = changed(SHAPES["HGX H100"].facts(), procs__dstate=[entry])
    (found,) = judge_node("n", told, HealthSettings(nodes={"n": NodeDeclaration(gpus=8)}), ["host.stuck_procs"])
    assert found.status is status


# --- memory errors


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"gpu1__ecc_unc": 1}, WARN),
        ({"gpu1__ecc_unc": 4}, FAIL),
        ({"gpu1__ecc_unc": 1, "gpu1__recovery_action": 1}, FAIL),
        ({"gpu1__ecc_unc": 1, "kernel_log": log("NVRM: Xid (PCI:0000:11:00): 95, pid=1, Uncontained")}, FAIL),
        ({"gpu1__ecc_unc": 1, "kernel_log": log("NVRM: Xid (PCI:0000:11:00): 94, pid=1, Contained")}, WARN),
    ],
    ids=["contained", "too many", "driver asks", "XID 95", "XID 94"],
)
def test_one_contained_memory_error_fails_no_node(changes: dict[str, Any], status: Status) -> None:
    told = changed(SHAPES["HGX H100"].facts(), **changes)
    found = judge_node("n", told, HealthSettings(nodes={"n": NodeDeclaration(gpus=8)}), ["gpu.ecc_uncorrected"])
    assert [f.status for f in found] == [status]


def test_rows_that_wait_for_a_reset_let_new_work_go_on() -> None:
    told = changed(SHAPES["HGX H100"].facts(), gpu1__remapped=[0, 1, 1, 0])
    found = judge_node("n", told, HealthSettings(nodes={"n": NodeDeclaration(gpus=8)}), ["gpu.remap_pending"])
    assert [f.status for f in found] == [WARN]


# --- clocks


def test_one_gpu_of_a_single_node_that_is_held_down_while_idle_stops_nothing() -> None:
    shape = SHAPES["HGX H100"]
    found = judged({"n0": changed(shape.facts(), gpu1__throttle=[0x88] * 3)}, shape)
    assert adverse(found) == {("gpu.throttle_hw", "n0", WARN, 1)}


@pytest.mark.parametrize("bits", [0x200, 0x400, 0x1, 0x4], ids=["board limit", "reliability", "idle", "power cap"])
def test_how_a_gpu_looks_at_its_highest_clock_is_no_slowdown(bits: int) -> None:
    shape = SHAPES["two RTX 4090 of two makers"]
    assert adverse(judged({"n0": changed(shape.facts(), gpu1__throttle=[bits])}, shape)) == set()


# --- mixtures and spares


def test_mixed_models_and_drivers_are_told_and_stop_nothing() -> None:
    old, new = SHAPES["driver 535 on A100 PCIe"], SHAPES["HGX H100"]
    told = {"n0": old.facts(0), "n1": new.facts(1), "n2": new.facts(2)}
    nodes = {"n0": NodeDeclaration(gpus=4), "n1": NodeDeclaration(gpus=8), "n2": NodeDeclaration(gpus=8)}
    found = judge_cluster(told, HealthSettings(nodes=nodes, framework="torch"))
    assert adverse(found) == {
        (check, "n0", WARN, None) for check in ("version.driver", "version.driver_minor", "version.gpu_model")
    }


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_spare_that_differs_is_to_blame_and_changes_no_verdict_about_workers(workers: int) -> None:
    shape = SHAPES["HGX H100"]
    told = {f"n{i}": shape.facts(i) for i in range(workers)}
    told["spare"] = changed(shape.facts(9), versions__torch="2.5.1")
    context = HealthSettings(nodes=dict.fromkeys(told, NodeDeclaration(gpus=8)), spares=frozenset({"spare"}))
    assert adverse(judge_cluster(told, context)) == {("version.torch", "spare", FAIL, None)}


def test_spares_do_not_outvote_a_worker() -> None:
    shape = SHAPES["HGX H100"]
    told = {"n0": changed(shape.facts(0), versions__nccl="2.26.2"), **{f"s{i}": shape.facts(i + 1) for i in range(3)}}
    context = HealthSettings(nodes=dict.fromkeys(told, NodeDeclaration(gpus=8)), spares=frozenset({"s0", "s1", "s2"}))
    assert adverse(judge_cluster(told, context)) == {("version.nccl", f"s{i}", FAIL, None) for i in range(3)}


# --- GPUs of another vendor


def test_checks_that_do_not_know_a_vendor_leave_its_gpus_alone() -> None:
    told = copy.deepcopy(SHAPES["CPUs only"].facts())
    told["groups"]["driver"]["data"]["pci"] = [{**healthy.pci(0x10), "vendor": "ascend", "class": "0x1200"}]
    found = judge_node("n", told, HealthSettings(nodes={"n": NodeDeclaration(gpus=1)}))
    assert {f.status for f in found if f.check.startswith("gpu.") and f.check != "gpu.vendor"} == {SKIP}
    assert [f.message for f in found if f.check == "gpu.vendor"] == ["clusterctl cannot check 1 GPU of Huawei Ascend"]


def test_insufficient_power_is_answered_with_cables_and_not_with_a_reboot() -> None:
    told = changed(SHAPES["two RTX 3090 without bridge"].facts(), err1__temp=8)
    (found,) = judge_node("n", told, HealthSettings(nodes={"n": NodeDeclaration(gpus=2)}), ["gpu.lost"])
    assert (found.action, "power cables" in str(found.hint)) == ("CHECK_POWER_COOLING", True)
