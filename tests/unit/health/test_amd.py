"""AMD's GPUs: what is a fault and what is not, and a remedy that names all that is reset together."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_cluster, judge_node, verdict
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health.healthy import GIB, UPTIME, changed, log
from tests.unit.health.machines import amd

FAIL, WARN, PASS, SKIP, UNKNOWN = Status.FAIL, Status.WARN, Status.PASS, Status.SKIP, Status.UNKNOWN
MI300X, MI250X = amd.SHAPES["eight MI300X"], amd.SHAPES["four MI250X, eight dies"]
ALL = "GPUs 0, 1, 2, 3, 4, 5, 6, 7 together"
HOLDER = {"pid": 4242, "used": 40 * GIB, "kind": "compute", "comm": "python", "user": 1007, "run": None}
FOREIGN = [{**HOLDER, "visible": True, "agent": False}]
KFD = "/dev/kfd"
PCI = "0000:26:00.0"
"""Of GPU 1 of the MI300X."""


def judged(shape: amd.AmdShape, declared: int | tuple[int, ...] | None = 8, **changes: Any) -> list[Finding]:
    context = HealthSettings(nodes={"n": NodeDeclaration(gpus=declared)}, framework="torch")
    return judge_node("n", changed(shape.facts(), **changes), context)


def adverse(findings: list[Finding]) -> dict[tuple[str, int | None], Finding]:
    return {(f.check, f.gpu): f for f in findings if f.status in (FAIL, WARN, UNKNOWN)}


@pytest.mark.parametrize("shape", [MI300X, MI250X], ids=["MI300X", "MI250X"])
@pytest.mark.parametrize(
    ("changes", "check", "status", "remedy"),
    [
        pytest.param(
            {"gpu3__bad_pages": {"retired": 16, "pending": 0, "failed": 16}},
            ("gpu.bad_pages", 3),
            FAIL,
            ALL,
            id="bad pages",
        ),
        pytest.param(
            {"gpu3__bad_pages": {"retired": 600, "pending": 0, "failed": 0}},
            ("gpu.bad_pages", 3),
            WARN,
            "replaced",
            id="many pages out of use",
        ),
        pytest.param({"gpu3__hive": "0000000000000bad"}, ("gpu.xgmi", 3), FAIL, ALL, id="out of the hive"),
        pytest.param({"gpu3__procs": FOREIGN}, ("gpu.foreign_procs", 3), FAIL, "End the process", id="foreign holder"),
        pytest.param(
            {"gpu3__memory": {"used": 9 * GIB, "total": 192 * GIB, "version": 1}},
            ("gpu.mem_used", 3),
            FAIL,
            "fuser -v /dev/nvidia* /dev/kfd",
            id="memory that nobody is seen to hold",
        ),
        pytest.param(
            {"amdgpu__dev": [{"path": KFD, "access": "denied"}]},
            ("gpu.device_access", None),
            FAIL,
            "`sudo usermod -aG render,video train`",
            id="no access",
        ),
        pytest.param(
            {"amdgpu__dev": [{"path": KFD, "access": "absent"}]},
            ("gpu.device_access", None),
            FAIL,
            "--device /dev/kfd",
            id="no device node",
        ),
        pytest.param(
            {"gpu3__ecc_unc": 1, "gpu3__ras": {"umc": [1, 4], "gfx": [0, 0]}},
            ("gpu.ecc_uncorrected", 3),
            FAIL,
            ALL,
            id="RAS uncorrectable",
        ),
        pytest.param({"gpu3__temp": 101.0}, ("gpu.temperature", 3), FAIL, "fans", id="too hot"),
        pytest.param({"gpu3__mem_temp": 106.0}, ("gpu.temperature", 3), FAIL, "fans", id="memory too hot"),
        pytest.param({"gpu3__util": 90}, ("gpu.idle", 3), WARN, "amd-smi", id="busy"),
        pytest.param({"err3__config": 19}, ("gpu.lost", 3), FAIL, "Reboot", id="off the bus"),
        pytest.param({"err3__temp": 1}, ("gpu.lost", 3), FAIL, ALL, id="being reset"),
        pytest.param({"gpu3__name": "AMD Instinct MI210"}, ("gpu.model", None), WARN, "one model", id="mixed"),
        pytest.param({"amdgpu": "timeout"}, ("gpu.responsive", None), FAIL, "Reboot", id="hung"),
        pytest.param(
            {"versions__torch": "2.9.0", "versions__torch_cuda": "12.8", "versions__torch_hip": None},
            ("version.gpu_build", None),
            FAIL,
            "whl/rocm",
            id="torch for CUDA",
        ),
        pytest.param(
            {"host__env": {"ROCR_VISIBLE_DEVICES": "0,1"}},
            ("gpu.visible_env", None),
            FAIL,
            "Unset",
            id="ROCR hides GPUs",
        ),
        pytest.param(
            {"host__env": {"HIP_VISIBLE_DEVICES": "0,1"}},
            ("gpu.visible_env", None),
            FAIL,
            "Unset",
            id="HIP hides GPUs",
        ),
        pytest.param(
            {"host__env": {"CUDA_VISIBLE_DEVICES": "0"}},
            ("gpu.visible_env", None),
            FAIL,
            "Unset",
            id="GPUs hidden in the words of CUDA, which HIP understands",
        ),
    ],
)
def test_a_fault_is_named_with_its_remedy(
    shape: amd.AmdShape, changes: dict[str, Any], check: tuple[str, int | None], status: Status, remedy: str
) -> None:
    found = adverse(judged(shape, **changes))
    assert found[check].status is status
    assert remedy in str(found[check].hint)


def test_variables_of_hip_do_no_harm_where_the_file_chooses_the_gpus() -> None:
    told = changed(MI300X.facts(), host__env={"HIP_VISIBLE_DEVICES": "7", "CUDA_VISIBLE_DEVICES": "7"})
    assert (
        adverse(judge_node("n", told, HealthSettings(nodes={"n": NodeDeclaration(gpus=(0, 2))}, framework="torch")))
        == {}
    )


def test_checks_of_nvidia_are_skipped_and_say_why() -> None:
    of_nvidia = {"gpu.xid", "gpu.nvlink", "gpu.fabric", "gpu.mig_mode", "gpu.persistence", "gpu.lib_mismatch"}
    found = {f.check: (f.status, f.message) for f in judged(MI300X)}
    assert {found[name] for name in of_nvidia} == {(SKIP, "not for AMD")}


def test_a_machine_whose_kernel_has_no_compute_driver_is_told_to_get_one() -> None:
    told = changed(MI300X.facts(), amdgpu="absent", driver__modules=[])
    found = adverse(judge_node("n", told, HealthSettings(nodes={"n": NodeDeclaration(gpus=8)})))
    assert "amdgpu is not loaded" in found["gpu.driver", None].message
    assert found["gpu.driver", None].status is FAIL
    assert "amdgpu driver" in str(found["gpu.driver", None].hint)


def test_a_computer_whose_display_is_amds_has_no_gpus_to_judge() -> None:
    display = [{**amd.cards([amd.mi300x(0)])[0], "class": "0x0300"}]
    facts = changed(
        MI300X.facts(), amdgpu="absent", driver__pci=display, versions__torch="2.8.0", versions__torch_hip=None
    )
    found = judge_node("n", facts, HealthSettings(nodes={"n": NodeDeclaration()}))
    assert {f.status for f in found if f.check.startswith("gpu.")} == {SKIP}


# --- which GPUs are ours


@pytest.mark.parametrize(
    ("hidden", "driver", "words", "action"),
    [
        pytest.param(6, "amdgpu", "the device cgroup denies access", "FIX_CONFIG", id="cgroup"),
        pytest.param(0, "amdgpu", "KFD does not list it", "REBOOT_NODE", id="not started"),
        pytest.param(0, None, "no driver is bound to it", "REBOOT_NODE", id="no driver"),
        pytest.param(0, "vfio-pci", "bound to vfio-pci", "FIX_CONFIG", id="given away"),
    ],
)
def test_gpus_that_are_missing_are_named_with_the_reason(
    hidden: int, driver: str | None, words: str, action: str
) -> None:
    facts = MI300X.facts()
    facts["groups"]["amdgpu"]["data"].update(amd.group([amd.mi300x(i, gpus=2) for i in range(2)]), hidden=hidden)
    for card in facts["groups"]["driver"]["data"]["pci"][2:]:
        card["driver"] = driver
    (found,) = judge_node("n", facts, HealthSettings(nodes={"n": NodeDeclaration(gpus=8)}), ["gpu.count"])
    assert (found.status, found.action) == (FAIL, action)
    assert words in found.message
    assert "0000:e5:00.0" in found.message


# --- links


def hives(*sizes: int) -> dict[str, Any]:
    """GPUs joined in groups, as bridges do."""
    changes: dict[str, Any] = {}
    index = 0
    for hive, size in enumerate(sizes, 1):
        members = range(index, index + size)
        for member in members:
            changes[f"gpu{member}__hive"] = f"{hive:016x}" if size > 1 else None
            changes[f"gpu{member}__xgmi"] = {str(peer): [15, 64000] for peer in members if peer != member}
            changes[f"gpu{member}__xgmi_links"] = [1] * (size - 1)
        index += size
    return changes


@pytest.mark.parametrize(
    ("sizes", "status"),
    [((8,), PASS), ((4, 4), PASS), ((2, 2, 2, 2), PASS), ((1,) * 8, SKIP), ((4, 1, 1, 1, 1), PASS), ((7, 1), FAIL)],
    ids=str,
)
def test_how_cards_are_bridged_is_no_fault_and_one_that_fell_out_is(sizes: tuple[int, ...], status: Status) -> None:
    found = [f for f in judged(MI300X, **hives(*sizes)) if f.check == "gpu.xgmi"]
    assert {f.status for f in found} == {status}, found


def test_a_pair_of_one_hive_without_a_link_is_named() -> None:
    lost = {str(peer): [15, 64000] for peer in range(8) if peer not in (2, 5)}
    found = adverse(judged(MI300X, gpu2__xgmi=lost))
    assert "no XGMI link between GPUs 2-5" in found["gpu.xgmi", None].message
    assert ALL in str(found["gpu.xgmi", None].hint)


def test_a_run_that_uses_some_gpus_is_told_to_reset_all_of_the_hive() -> None:
    found = adverse(judged(MI300X, declared=(0, 1), gpu1__xgmi_links=[1] * 6 + [0]))
    assert ALL in str(found["gpu.xgmi", 1].hint)


def test_a_link_that_came_up_slower_is_held_against_the_same_pair_of_other_nodes() -> None:
    slow = {**amd.mi250x(0)["v"]["xgmi"], "1": [15, 100000]}
    told = {f"n{i}": MI250X.facts(i) for i in range(3)}
    told["n1"] = changed(told["n1"], gpu0__xgmi=slow)
    found = judge_cluster(told, HealthSettings(nodes=dict.fromkeys(told, NodeDeclaration(gpus=8))))
    assert [(f.check, f.node, f.status) for f in found if f.status in (FAIL, WARN)] == [
        ("gpu.xgmi_outlier", "n1", FAIL)
    ]


# --- the kernel log


def line(text: str, device: str = PCI) -> str:
    return f"amdgpu {device}: amdgpu: {text}"


RAS = line("socket: 0, die: 1 3 uncorrectable hardware errors detected in umc block")
BEGIN, DONE = line("GPU reset begin!. Source:  3"), line("GPU reset(2) succeeded!")


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        pytest.param([RAS], FAIL, "uncorrected errors in umc", id="ras"),
        pytest.param([RAS, BEGIN, DONE], WARN, "reset since", id="ras, reset"),
        pytest.param(
            [line("no uncorrectable hardware errors detected in umc block")], PASS, "no error of amdgpu", id="clear"
        ),
        pytest.param(
            [line("0 uncorrectable hardware errors detected in umc block")], PASS, "no error of amdgpu", id="nought"
        ),
        pytest.param(
            [line("1048560 uncorrectable hardware errors detected in umc block")],
            PASS,
            "no error of amdgpu",
            id="bogus",
        ),
        pytest.param(
            [line("12 correctable hardware errors detected in umc block")], PASS, "no error of amdgpu", id="corrected"
        ),
        pytest.param([line("ring comp_1.0.1 timeout, signaled seq=4, emitted seq=6")], WARN, "hung", id="hang"),
        pytest.param([line("ring comp_1.0.1 timeout, but soft recovered")], PASS, "no error of amdgpu", id="recovered"),
        pytest.param([BEGIN], PASS, "no error of amdgpu", id="reset under way"),
        pytest.param([BEGIN, DONE], WARN, "the GPU was reset", id="reset"),
        pytest.param([BEGIN, line("GPU reset(2) failed")], FAIL, "a reset of the GPU failed", id="reset failed"),
        pytest.param([line("device lost from bus!")], FAIL, "GPU is lost", id="lost"),
        pytest.param([line("Saved bad pages 2049 reaches threshold value 2048")], FAIL, "more bad memory", id="worn"),
        pytest.param([line("Fatal error during GPU init")], FAIL, "could not start", id="init"),
    ],
)
def test_lines_of_the_driver_are_weighed(lines: list[str], status: Status, words: str) -> None:
    found = [f for f in judged(MI300X, kernel_log=log(*lines)) if f.check == "gpu.driver_log"]
    assert status in {f.status for f in found}
    assert {f.status for f in found} <= {status, WARN}
    assert any(words in f.message for f in found), [f.message for f in found]


def test_a_reset_that_began_long_ago_and_never_ended_is_a_fault() -> None:
    (found,) = [f for f in judged(MI300X, kernel_log=log(BEGIN, age=600.0)) if f.check == "gpu.driver_log"]
    assert (found.status, found.action, found.gpu) == (FAIL, "REBOOT_NODE", 1)


def test_errors_that_are_counted_still_are_history_once_the_gpu_was_reset() -> None:
    changes = {"gpu1__ecc_unc": 3, "kernel_log": log(RAS, BEGIN, DONE)}
    found = adverse(judged(MI300X, **changes))
    assert found["gpu.ecc_uncorrected", 1].status is WARN
    assert verdict([found["gpu.ecc_uncorrected", 1]]) is WARN


def test_old_hangs_are_forgotten_and_old_hardware_is_not() -> None:
    old = log(line("ring gfx timeout, signaled"), line("device lost from bus!"), age=UPTIME - 100.0)
    found = [f for f in judged(MI300X, kernel_log=old) if f.check == "gpu.driver_log"]
    assert [(f.status, f.gpu) for f in found] == [(FAIL, 1)]


def test_one_kind_can_be_silenced() -> None:
    context = HealthSettings(nodes={"n": NodeDeclaration(gpus=8)}, severity={"amdgpu.hang": "ignore"})
    facts = changed(MI300X.facts(), kernel_log=log(line("ring gfx timeout, signaled")))
    (found,) = judge_node("n", facts, context, ["gpu.driver_log"])
    assert found.ignored
