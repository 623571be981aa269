"""Facts through the real bindings and a library that plays sick GPUs, judged: each fault is found by node and GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.facts import gpu_reading_base as agent_answers
from clusterctl.health import gpu_library_errors
from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_node, verdict
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests import fake_nvml

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FAIL, WARN, UNKNOWN, PASS = Status.FAIL, Status.WARN, Status.UNKNOWN, Status.PASS


class Machine:
    """A machine whose GPUs, kernel log and tree are made up."""

    def __init__(self, folder: Path, gpus: int = 8) -> None:
        self.folder = folder
        self.root = fake_nvml.root(folder / "root", gpus=gpus)
        self.scene = fake_nvml.Scenario(folder / "scenario.json", gpus)
        self.bin = folder / "bin"
        self.path = [str(self.bin)]
        self.dmesg("[    1.000000] Linux version 6.8.0")

    def dmesg(self, *lines: str) -> None:
        fake_nvml.program(self.bin, "dmesg", output="\n".join(lines) + "\n")

    def look(self, deadline: float = 5.0, **request: Any) -> dict[str, Any]:
        env = {**os.environ, **self.scene.environment(), "PATH": ":".join([*self.path, os.environ["PATH"]])}
        asked = {"root": str(self.root), "deadline": deadline, **request}
        argv = [sys.executable, "-m", "clusterctl.agent", "facts"]
        done = subprocess.run(argv, input=json.dumps(asked), env=env, capture_output=True, text=True, check=True)
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def judge(
        self, gpus: int | None = 8, context: dict[str, Any] | None = None, **request: Any
    ) -> dict[str, list[Finding]]:
        told = self.look(groups=["nvml", "driver", "kernel_log"], **request)
        found: dict[str, list[Finding]] = {}
        for finding in judge_node(
            "gpu03", told, HealthSettings(nodes={"gpu03": NodeDeclaration(gpus=gpus)}, **(context or {}))
        ):
            if finding.check.startswith("gpu."):
                found.setdefault(finding.check, []).append(finding)
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def adverse(found: dict[str, list[Finding]]) -> set[tuple[str, Status, int | None]]:
    return {(f.check, f.status, f.gpu) for group in found.values() for f in group if f.status in (FAIL, WARN)}


def test_eight_healthy_gpus_pass_every_check_that_looks_at_them(machine: Machine) -> None:
    found = machine.judge()
    assert adverse(found) == set()
    # Process list and host are left out of this look, so what needs them says so.
    unknown = {name for name, group in found.items() if group[0].status is UNKNOWN}
    assert unknown == {"gpu.fabric_manager", "gpu.bad_env"}
    assert sum(group[0].status is PASS for group in found.values()) >= 25


def lost(machine: Machine) -> None:
    machine.scene.gpu(3, errors={"*": fake_nvml.LOST})


def lost_later(machine: Machine) -> None:
    machine.scene.gpu(3, errors={"nvmlDeviceGetTemperature": fake_nvml.LOST})


def remap_failure(machine: Machine) -> None:
    machine.scene.gpu(5, remapped=[0, 2, 0, 1])


def hot(machine: Machine) -> None:
    machine.scene.gpu(5, throttle=fake_nvml.HW_THERMAL, temp=88)


def foreign(machine: Machine) -> None:
    comm = machine.root / "proc/4242/comm"
    comm.parent.mkdir()
    comm.write_text("python\n")
    machine.scene.gpu(2, compute_procs=[{"pid": 4242, "used": 3 << 30}], mem_used=3 << 30)


def invisible(machine: Machine) -> None:
    machine.scene.gpu(2, compute_procs=[{"pid": 4243, "used": 3 << 30}], mem_used=3 << 30)


def missing(machine: Machine) -> None:
    machine.scene.data["devices"].pop()
    machine.scene.write()


def mismatch(machine: Machine) -> None:
    machine.scene.system(errors={"nvmlInitWithFlags": fake_nvml.MISMATCH})


def no_driver(machine: Machine) -> None:
    machine.scene.system(errors={"nvmlInitWithFlags": fake_nvml.NOT_LOADED})


def xid79(machine: Machine) -> None:
    machine.dmesg("[899990.500000] NVRM: Xid (PCI:0000:16:00): 79, pid=1234, GPU has fallen off the bus.")


def recovery(machine: Machine) -> None:
    machine.scene.gpu(6, fields={"230": 1})


def dead_pair(machine: Machine) -> None:
    machine.scene.gpu(0, p2p={"1": 6})


def odd_once(machine: Machine) -> None:
    machine.scene.gpu(4, errors={"nvmlDeviceGetTemperature": fake_nvml.times(1)})


def odd_twice(machine: Machine) -> None:
    machine.scene.gpu(4, errors={"nvmlDeviceGetTemperature": fake_nvml.times(2)})


def odd_three_times(machine: Machine) -> None:
    machine.scene.gpu(4, errors={"nvmlDeviceGetTemperature": fake_nvml.times(3)})


def odd_handle(machine: Machine) -> None:
    machine.scene.gpu(4, errors={"nvmlDeviceGetHandleByIndex_v2": fake_nvml.times(1)})


def at_its_limit(machine: Machine) -> None:
    machine.scene.gpu(4, temp=90, margin=0)


def old_thresholds(machine: Machine) -> None:
    machine.scene.all(margin=None, fields={"193": None, "194": None, "195": None, "196": None})
    machine.scene.gpu(4, temp=91)


def spare_rows_gone(machine: Machine) -> None:
    machine.scene.gpu(4, rows=[2559, 0, 0, 0, 1])


def pages_retired(machine: Machine) -> None:
    machine.scene.all(remapped=None, rows=None, retired_pending=0, fields={"29": 0, "30": 0})
    machine.scene.gpu(4, fields={"29": 20, "30": 41})


def drained(machine: Machine) -> None:
    machine.scene.gpu(4, fields={"230": 3})


def fabric_limited(machine: Machine) -> None:
    machine.scene.gpu(4, fabric={"health": 3})


def no_unified_memory(machine: Machine) -> None:
    (machine.root / "dev/nvidia-uvm").unlink()


def no_fabric(machine: Machine) -> None:
    machine.scene.all(fabric={"state": 1})


def mig_on(machine: Machine) -> None:
    machine.scene.gpu(1, mig=[1, 1])


def bad_inforom(machine: Machine) -> None:
    machine.scene.gpu(1, errors={"nvmlDeviceValidateInforom": 14})


def narrow(machine: Machine) -> None:
    machine.scene.gpu(4, pcie_width=8)


def links_down(machine: Machine) -> None:
    machine.scene.gpu(4, nvlinks=[1] * 12 + [0] * 6)


def sram(machine: Machine) -> None:
    machine.scene.gpu(4, sram_unc=9, sram_threshold=1)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lost, {("gpu.lost", FAIL, 3)}),
        (lost_later, {("gpu.lost", FAIL, 3)}),
        (remap_failure, {("gpu.remap_failure", FAIL, 5)}),
        (hot, {("gpu.throttle_hw", WARN, 5), ("gpu.temperature", WARN, 5)}),
        (foreign, {("gpu.foreign_procs", FAIL, 2), ("gpu.mem_used", FAIL, 2)}),
        (invisible, {("gpu.foreign_procs", FAIL, 2), ("gpu.mem_used", FAIL, 2)}),
        (missing, {("gpu.count", FAIL, None)}),
        (mismatch, {("gpu.lib_mismatch", FAIL, None)}),
        (no_driver, {("gpu.driver", FAIL, None)}),
        (xid79, {("gpu.xid", FAIL, 6)}),
        (recovery, {("gpu.recovery_action", FAIL, 6)}),
        (dead_pair, {("gpu.p2p", FAIL, None)}),
        (no_fabric, {("gpu.fabric", FAIL, gpu) for gpu in range(8)}),
        (mig_on, {("gpu.mig_mode", FAIL, 1)}),
        (bad_inforom, {("gpu.inforom", FAIL, 1)}),
        (narrow, {("gpu.pcie_width", FAIL, 4)}),
        (links_down, {("gpu.nvlink", FAIL, 4)}),
        (sram, {("gpu.sram_ecc", FAIL, 4)}),
        (odd_once, {("gpu.lost", WARN, 4)}),
        (odd_twice, {("gpu.lost", WARN, 4)}),
        (odd_three_times, {("gpu.lost", FAIL, 4)}),
        (odd_handle, {("gpu.lost", WARN, 4)}),
        (at_its_limit, {("gpu.temperature", FAIL, 4)}),
        (old_thresholds, {("gpu.temperature", FAIL, 4)}),
        (spare_rows_gone, {("gpu.remap_total", WARN, 4)}),
        (pages_retired, {("gpu.retired_pages", FAIL, 4)}),
        (drained, {("gpu.recovery_action", WARN, 4)}),
        (fabric_limited, {("gpu.fabric", WARN, 4)}),
        (no_unified_memory, {("gpu.device_access", FAIL, None)}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_fault_is_found_and_its_gpu_named_and_no_other_blamed(
    machine: Machine, make: Callable[[Machine], None], expected: set[tuple[str, Status, int | None]]
) -> None:
    make(machine)
    found = machine.judge()
    assert adverse(found) == expected
    for name, _, _ in expected:
        assert all(f.hint and f.node == "gpu03" for f in found[name])


def test_a_missing_gpu_is_named_by_its_address(machine: Machine) -> None:
    missing(machine)
    assert "7 of 8 GPUs; not shown by the driver: 0000:17:00.0" in machine.judge()["gpu.count"][0].message


def test_a_hung_library_is_named_and_the_probe_ends_in_time(machine: Machine) -> None:
    machine.scene.system(hang=["nvmlInitWithFlags"])
    began = time.monotonic()
    found = machine.judge(deadline=1.0)
    assert time.monotonic() - began < 3
    assert adverse(found) == {("gpu.responsive", FAIL, None)}
    assert re.search(r"no answer within \d+\.\d s", found["gpu.responsive"][0].message)
    assert found["gpu.count"][0].status is UNKNOWN


def test_a_driver_that_hangs_for_its_whole_time_costs_the_others_none_of_theirs(machine: Machine) -> None:
    machine.scene.system(hang=["nvmlInitWithFlags"])
    told = machine.look(deadline=1.0, deadlines={"nvml": 3.0})
    groups = told["groups"]
    assert (groups["nvml"]["status"], groups["nvml"]["ms"] > 2500) == ("timeout", True)
    assert all(group["ms"] < 1500 for name, group in groups.items() if name != "nvml")


def test_a_driver_that_starts_each_gpu_first_is_slow_and_not_hung(machine: Machine) -> None:
    """Without persistence mode the first handle of each GPU costs seconds."""
    machine.scene.all(persistence=0)
    machine.scene.system(delay_ms={"nvmlDeviceGetHandleByIndex_v2": 250})
    found = machine.judge(deadline=1.0, deadlines={"nvml": 30.0}, context={"thresholds": {"gpu.responsive.warn": 1.5}})
    slow = found["gpu.responsive"][0]
    assert {(name, status) for name, status, _ in adverse(found)} == {
        ("gpu.responsive", WARN),
        ("gpu.persistence", WARN),
    }
    assert re.fullmatch(r"NVML took \d\.\d s: initialisation [2-9]\.\d s, readings \d\.\d s", slow.message)
    assert "persistence mode" in str(slow.hint)


def test_looking_again_pauses_once_for_all_gpus_together(machine: Machine) -> None:
    """Eight GPUs one after the other would take eight times the pauses of one: 2.7 seconds."""
    gone = [{"pid": 4_194_301, "used": 5}]
    machine.scene.all(throttle=fake_nvml.HW_THERMAL, compute_procs=gone)
    nvml = machine.look(groups=["nvml"])["groups"]["nvml"]
    assert [len(device["v"]["throttle"]) for device in nvml["data"]["devices"]] == [3] * 8
    assert nvml["ms"] - nvml["data"]["init_ms"] < 1500


def test_an_odd_answer_names_the_call_that_got_it_each_time(machine: Machine) -> None:
    odd_three_times(machine)
    assert machine.judge()["gpu.lost"][0].message.endswith(": unknown error (temp), 3 readings in a row")
    odd_once(machine)
    assert machine.judge()["gpu.lost"][0].message.endswith(": unknown error (temp), then no error")


def test_one_hung_gpu_hangs_nobody_else(machine: Machine) -> None:
    machine.scene.gpu(3, hang=["nvmlDeviceGetName"])
    told = machine.look(deadline=1.0)
    assert [entry["group"] for entry in told["stuck"]] == ["nvml"]
    others = {name: group["status"] for name, group in told["groups"].items() if name != "nvml"}
    assert "timeout" not in others.values()


WORDS = {
    3: "unsupported",
    4: "denied",
    8: "power",
    10: "timeout",
    11: "unknown",
    13: "unsupported",
    14: "corrupted",
    15: "lost",
    16: "reset-required",
    28: "lost",
    999: "unknown",
}


def test_every_word_for_an_answer_has_a_meaning_for_the_judges() -> None:
    known = {
        *gpu_library_errors.ERROR_MEANINGS,
        gpu_library_errors.UNSUPPORTED,
        gpu_library_errors.DENIED,
        gpu_library_errors.CORRUPTED,
        gpu_library_errors.FAILED,
    }
    of_nvml = {agent_answers.NVML_ERROR_NAMES.get(code, agent_answers.FAILED) for code in range(1000)}
    assert set(WORDS.values()) | {"failed"} == of_nvml
    assert of_nvml | set(agent_answers.FILE_ERROR_NAMES.values()) == known


@pytest.mark.parametrize("code", [1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 28, 999])
def test_no_return_code_of_one_call_hides_another_value(machine: Machine, code: int) -> None:
    machine.scene.gpu(0, errors={"nvmlDeviceGetEccMode": code})
    device = machine.look(groups=["nvml"])["groups"]["nvml"]["data"]["devices"][0]
    assert (device["codes"]["ecc_mode"], device["err"]["ecc_mode"]) == (code, WORDS.get(code, "failed"))
    assert {"temp", "memory", "uuid", "nvlinks", "procs"} <= set(device["v"])


@pytest.mark.parametrize("code", [3, 13])
def test_what_a_card_does_not_have_is_skipped(machine: Machine, code: int) -> None:
    machine.scene.all(errors={"nvmlDeviceGetEccMode": code})
    assert machine.judge()["gpu.ecc_mode"][0].status is Status.SKIP


def test_an_old_driver_without_the_second_memory_call_is_read_by_the_first(machine: Machine) -> None:
    machine.scene.all(errors={"nvmlDeviceGetMemoryInfo_v2": 13})
    found = machine.judge()
    assert found["gpu.mem_used"][0].status is PASS


def test_a_gpu_without_memory_of_its_own_uses_that_of_the_machine(machine: Machine) -> None:
    machine.scene.all(errors={"nvmlDeviceGetMemoryInfo_v2": 3, "nvmlDeviceGetMemoryInfo": 3})
    (machine.root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    device = machine.look(groups=["nvml"])["groups"]["nvml"]["data"]["devices"][0]
    assert device["v"]["memory"] == {"used": 102400, "total": 1024000, "version": 0}
    assert "memory" not in device["err"]
    assert machine.judge()["gpu.mem_used"][0].status is PASS


def test_slowdown_seen_once_only_is_a_warning(machine: Machine) -> None:
    machine.scene.gpu(1, throttle=fake_nvml.SW_THERMAL)
    assert adverse(machine.judge()) == {("gpu.throttle_sw", WARN, 1)}


@pytest.mark.parametrize("name", ["no driver", "mismatch", "lost"])
def test_the_second_source_is_asked_where_the_library_failed(machine: Machine, name: str) -> None:
    output, error, code = fake_nvml.SMI_OUTPUTS[name]
    fake_nvml.program(machine.bin, "nvidia-smi", output=output, error=error, code=code)
    machine.scene.system(errors={"nvmlInitWithFlags": code})
    smi = machine.look(groups=["nvml", "smi"])["groups"]["smi"]
    assert (smi["status"], smi["data"]["rc"], smi["data"]["devices"]) == ("ok", code, [])
    assert (output or error).split()[0] in smi["data"]["errors"][0]


def test_a_node_that_declares_no_gpus_never_touches_the_driver(machine: Machine) -> None:
    machine.scene.system(hang=["nvmlInitWithFlags"])
    found = machine.look(groups=["nvml"], expect_gpus=False)["groups"]["nvml"]
    assert found["status"] == "absent"


# --- ordinary users, containers, old drivers


def plain_user(machine: Machine) -> None:
    fake_nvml.program(machine.bin, "dmesg", error=fake_nvml.DMESG_DENIED, code=1)
    fake_nvml.program(machine.bin, "journalctl")


def driver_550(machine: Machine) -> None:
    fields = {"230": {"error": 2}, "193": {"error": 2}, "194": {"error": 2}, "195": {"error": 2}, "196": {"error": 2}}
    machine.scene.system(driver="550.54.15", cuda=12040, errors={"nvmlDeviceGetMarginTemperature": 13})
    machine.scene.all(fields=fields)
    (machine.root / "sys/module/nvidia/version").write_text("550.54.15\n")


@pytest.mark.parametrize("old", [False, True], ids=["570", "550"])
def test_a_machine_whose_kernel_log_is_closed_passes_strictly_for_a_plain_user(machine: Machine, old: bool) -> None:
    plain_user(machine)
    if old:
        driver_550(machine)
    told = machine.look()
    context = HealthSettings(nodes={"gpu03": NodeDeclaration(gpus=8)})
    findings = [f for f in judge_node("gpu03", told, context) if f.check.startswith(("gpu.", "host.kernel"))]
    assert {f.check for f in findings if f.needs_root} == {"gpu.xid", "gpu.sxid", "host.kernel_log"}
    assert verdict(findings, strict=True) is PASS, [f for f in findings if f.status not in (PASS, Status.SKIP)]


def given(folder: Path, shown: int, nodes: int) -> Machine:
    """A machine with eight GPUs on the PCI bus, of which the library shows some and /dev has some."""
    made = Machine(folder, gpus=8)
    for index in range(nodes, 8):
        (made.root / f"dev/nvidia{index}").unlink()
    made.scene = fake_nvml.Scenario(folder / "few.json", shown)
    return made


@pytest.mark.parametrize("declared", [None, 2, (0, 1)], ids=["not declared", "two", "by index"])
def test_a_container_with_two_of_eight_gpus_is_judged_by_its_two(
    tmp_path: Path, declared: int | tuple[int, ...] | None
) -> None:
    found = given(tmp_path, 2, 2).judge(declared)
    assert adverse(found) == set()
    assert found["gpu.count"][0].message.startswith("2 GPUs; withheld by a scheduler or container: 0000:12:00.0")


def test_a_gpu_that_has_a_device_node_and_is_not_shown_is_missing(tmp_path: Path) -> None:
    found = given(tmp_path, 7, 8).judge(None)
    assert adverse(found) == {("gpu.count", FAIL, None)}
    assert (
        found["gpu.count"][0].message
        == "7 GPUs, 8 on the PCI bus; not shown by the driver: 0000:17:00.0 (NVML does not list it)"
    )


def test_a_gpu_that_a_virtual_machine_has_is_not_missing(tmp_path: Path) -> None:
    made = given(tmp_path, 7, 7)
    link = made.root / "sys/bus/pci/devices/0000:17:00.0/driver"
    link.unlink()
    link.symlink_to("/sys/bus/pci/drivers/vfio-pci")
    found = made.judge(None)
    assert adverse(found) == set()
    assert "0000:17:00.0 (bound to vfio-pci)" in found["gpu.count"][0].message


def test_a_node_that_is_closed_matters_only_where_the_run_uses_the_gpu(machine: Machine) -> None:
    """The probe runs as somebody whom the nodes of the last four GPUs are closed to."""
    shut = [machine.root / f"dev/nvidia{index}" for index in range(4, 8)]
    told = machine.look(groups=["nvml", "driver"])
    for node in told["groups"]["driver"]["data"]["dev"]:
        node["readable"] = node["path"] not in {f"/dev/{path.name}" for path in shut}
    seen = []
    for declared in (4, 8):
        found = judge_node(
            "n", told, HealthSettings(nodes={"n": NodeDeclaration(gpus=declared)}), ["gpu.device_access"]
        )
        seen.append((found[0].status, found[0].message))
    closed = ", ".join(f"/dev/nvidia{index}" for index in range(4, 8))
    assert seen == [(PASS, "6 device files are accessible"), (FAIL, f"no access to {closed}")]


def test_lanes_of_a_narrow_slot_are_its_design_and_lanes_lost_in_a_wide_one_are_named(tmp_path: Path) -> None:
    made = Machine(tmp_path)
    made.scene.gpu(4, pcie_width=4)
    (made.root / "sys/devices/pci0000:00/0000:00:05.0/max_link_width").write_text("4\n")
    assert adverse(made.judge()) == set()
    made.scene.gpu(4, pcie_width=2)
    assert adverse(made.judge()) == {("gpu.pcie_width", FAIL, 4)}


def test_a_port_that_a_virtual_machine_makes_up_says_nothing_of_a_slot(tmp_path: Path) -> None:
    made = Machine(tmp_path)
    made.scene.gpu(4, pcie_width=8)
    (made.root / "sys/devices/pci0000:00/0000:00:05.0/vendor").write_text("0x1b36\n")
    assert adverse(made.judge()) == set()


def test_a_link_that_a_card_does_not_have_hides_none_behind_it(machine: Machine) -> None:
    machine.scene.gpu(4, nvlinks=[1, None, *[1] * 15, 0, None, None])
    device = machine.look(groups=["nvml"])["groups"]["nvml"]["data"]["devices"][4]
    assert device["v"]["nvlinks"] == [1, None, *[1] * 15, 0]


def test_a_card_without_nvlink_says_so(machine: Machine) -> None:
    machine.scene.all(nvlinks=[None] * 18, fabric=None)
    assert machine.judge()["gpu.nvlink"][0].status is Status.SKIP
