"""Facts through the real bindings and a library that plays sick GPUs, judged: each fault is found by node and GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.health.context import Context, Expectation
from clusterctl.health.judge import judge_node
from clusterctl.health.model import Finding, Status
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
        argv = [sys.executable, "-m", "clusterctl.agent.facts"]
        done = subprocess.run(argv, input=json.dumps(asked), env=env, capture_output=True, text=True, check=True)
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def judge(self, gpus: int | None = 8, **request: Any) -> dict[str, list[Finding]]:
        told = self.look(groups=["nvml", "driver", "kernel_log"], **request)
        found: dict[str, list[Finding]] = {}
        for finding in judge_node("gpu03", told, Context(nodes={"gpu03": Expectation(gpus=gpus)})):
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
    machine.scene.gpu(0, p2p_broken=[1])


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
        (hot, {("gpu.throttle_hw", FAIL, 5), ("gpu.temperature", WARN, 5)}),
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
        (bad_inforom, {("gpu.inforom", FAIL, 1), ("gpu.lost", FAIL, 1)}),
        (narrow, {("gpu.pcie_width", FAIL, 4)}),
        (links_down, {("gpu.nvlink", FAIL, 4)}),
        (sram, {("gpu.sram_ecc", FAIL, 4)}),
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
    assert "7 of 8 GPUs; not shown: 0000:17:00.0" in machine.judge()["gpu.count"][0].message


def test_a_hung_library_is_named_and_the_probe_ends_in_time(machine: Machine) -> None:
    machine.scene.system(hang=["nvmlInitWithFlags"])
    began = time.monotonic()
    found = machine.judge(deadline=1.0)
    assert time.monotonic() - began < 3
    assert adverse(found) == {("gpu.responsive", FAIL, None)}
    assert "no answer within 1.0 s" in found["gpu.responsive"][0].message
    assert found["gpu.count"][0].status is UNKNOWN


def test_one_hung_gpu_hangs_nobody_else(machine: Machine) -> None:
    machine.scene.gpu(3, hang=["nvmlDeviceGetName"])
    told = machine.look(deadline=1.0)
    assert [entry["group"] for entry in told["stuck"]] == ["nvml"]
    others = {name: group["status"] for name, group in told["groups"].items() if name != "nvml"}
    assert "timeout" not in others.values()


@pytest.mark.parametrize("code", [1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 28, 999])
def test_no_return_code_of_one_call_hides_another_value(machine: Machine, code: int) -> None:
    machine.scene.gpu(0, errors={"nvmlDeviceGetEccMode": code})
    device = machine.look(groups=["nvml"])["groups"]["nvml"]["data"]["devices"][0]
    assert device["err"]["ecc_mode"] == code
    assert {"temp", "memory", "uuid", "nvlinks", "procs"} <= set(device["v"])


@pytest.mark.parametrize("code", [3, 13])
def test_what_a_card_does_not_have_is_skipped(machine: Machine, code: int) -> None:
    machine.scene.all(errors={"nvmlDeviceGetEccMode": code})
    assert machine.judge()["gpu.ecc_mode"][0].status is Status.SKIP


def test_an_old_driver_without_the_second_memory_call_is_read_by_the_first(machine: Machine) -> None:
    machine.scene.all(errors={"nvmlDeviceGetMemoryInfo_v2": 13})
    found = machine.judge()
    assert found["gpu.mem_used"][0].status is PASS


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
