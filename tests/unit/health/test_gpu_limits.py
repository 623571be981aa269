"""Every branch of the checks of a GPU's memory and heat: at its limit, just beyond, in some looks and in all."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_node
from clusterctl.health.registry import CHECKS
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health.healthy import changed, facts

FAIL, WARN, PASS = Status.FAIL, Status.WARN, Status.PASS
GPU = "GPU 1 (00000000:11:00.0)"


def judged(check: str, changes: dict[str, Any], **thresholds: float) -> list[Finding]:
    context = HealthSettings(
        nodes={"n0": NodeDeclaration(gpus=8)},
        thresholds={f"{check}.{name}": value for name, value in thresholds.items()},
    )
    return judge_node("n0", changed(facts(), **changes), context, [check])


# A GPU before Ada: it tells its temperature and its limits, not how far it is from them.
OLD = {"margin": None, "tlimit_gpu_max": None}


@pytest.mark.parametrize(
    ("check", "changes", "status", "message", "value", "expected"),
    [
        pytest.param("gpu.ecc_mode", {"ecc_mode": [0, 0]}, WARN, "ECC is off", [0, 0], None, id="ecc off"),
        pytest.param(
            "gpu.ecc_mode",
            {"ecc_mode": [1, 0]},
            WARN,
            "ECC changes at the next reboot",
            [1, 0],
            None,
            id="ecc off soon",
        ),
        pytest.param(
            "gpu.ecc_mode",
            {"ecc_mode": [0, 1], "ecc_default": 0},
            WARN,
            "ECC changes at the next reboot",
            [0, 1],
            None,
            id="ecc on soon",
        ),
        pytest.param(
            "gpu.ecc_uncorrected", {"ecc_unc": 4}, FAIL, "4 uncorrected memory errors", 4, 0, id="uncorrected, many"
        ),
        pytest.param(
            "gpu.ecc_uncorrected",
            {"ecc_unc": 1, "recovery_action": 1},
            FAIL,
            "1 uncorrected memory errors",
            1,
            0,
            id="uncorrected, and the driver asks for something",
        ),
        pytest.param(
            "gpu.ecc_corrected",
            {"ecc_cor": 20_000_001},
            WARN,
            "20000001 corrected memory errors",
            20_000_001,
            2e7,
            id="corrected",
        ),
        pytest.param(
            "gpu.sram_ecc",
            {"sram": {"unc": 0, "threshold": 1}},
            FAIL,
            "SRAM errors exceed NVIDIA's limit",
            {"unc": 0, "threshold": 1},
            None,
            id="sram beyond nvidia's limit",
        ),
        pytest.param(
            "gpu.sram_ecc",
            {"sram": {"unc": 5, "threshold": 0}},
            WARN,
            "5 uncorrected SRAM errors",
            {"unc": 5, "threshold": 0},
            None,
            id="sram beyond ours",
        ),
        pytest.param(
            "gpu.remap_pending", {"remapped": [0, 0, 1, 0]}, WARN, "row remapping waits for a reset", 1, 0, id="pending"
        ),
        pytest.param(
            "gpu.remap_pending",
            {"remapped": [0, 0, 1, 0], "recovery_action": 1},
            FAIL,
            "row remapping waits for a reset",
            1,
            0,
            id="pending, and the driver asks for it",
        ),
        pytest.param(
            "gpu.remap_failure",
            {"remapped": [0, 0, 0, 1], "serial": "42"},
            FAIL,
            "row remapping failed, serial 42",
            1,
            0,
            id="remapping failed",
        ),
        pytest.param(
            "gpu.remap_failure",
            {"remapped": [0, 0, 0, 1], "serial": None},
            FAIL,
            "row remapping failed",
            1,
            0,
            id="remapping failed, no serial",
        ),
        pytest.param(
            "gpu.remap_total",
            {"rows": {"max": 7, "high": 1, "partial": 1, "low": 1, "none": 0}},
            WARN,
            "0 banks without a spare row, 1 with few, of 10",
            {"max": 7, "high": 1, "partial": 1, "low": 1, "none": 0},
            None,
            id="few spare rows",
        ),
        pytest.param(
            "gpu.remap_total",
            {"rows": {"max": 7, "high": 0, "partial": 0, "low": 0, "none": 2}},
            WARN,
            "2 banks without a spare row, 0 with few, of 9",
            {"max": 7, "high": 0, "partial": 0, "low": 0, "none": 2},
            None,
            id="no spare rows",
        ),
        pytest.param(
            "gpu.repair_pending",
            {"repair": [1, 0]},
            WARN,
            "a repair waits for a reboot",
            [1, 0],
            None,
            id="channel repair",
        ),
        pytest.param(
            "gpu.repair_pending", {"repair": [0, 1]}, WARN, "a repair waits for a reboot", [0, 1], None, id="tpc repair"
        ),
        pytest.param(
            "gpu.retired_pages", {"retired_pending": 2}, FAIL, "page retirement waits for a reset", 2, None, id="pages"
        ),
        pytest.param(
            "gpu.temperature", {**OLD, "temp": 90}, FAIL, "core 90 °C, limit 90 °C", 90, 90, id="core at its limit"
        ),
        pytest.param(
            "gpu.temperature", {**OLD, "temp": 89}, WARN, "core 89 °C, limit 90 °C", 89, 90, id="core within margin"
        ),
        pytest.param(
            "gpu.temperature", {**OLD, "temp": 85}, WARN, "core 85 °C, limit 90 °C", 85, 90, id="core at the margin"
        ),
        pytest.param(
            "gpu.temperature",
            {**OLD, "temp": 88, "temp_max": None},
            FAIL,
            "core 88 °C, limit 87 °C",
            88,
            87,
            id="core without a limit of its own",
        ),
        pytest.param("gpu.temperature", {"margin": 0}, FAIL, "core 32 °C, limit 32 °C", 32, 32, id="no margin is left"),
        pytest.param(
            "gpu.temperature",
            {"margin": 7, "tlimit_gpu_max": 3},
            WARN,
            "core 32 °C, limit 36 °C",
            32,
            36,
            id="little margin to a limit before the last",
        ),
        pytest.param(
            "gpu.temperature", {"mem_temp": 96}, FAIL, "memory 96 °C, limit 95 °C", 96, 95, id="memory beyond its limit"
        ),
        pytest.param(
            "gpu.temperature", {"mem_temp": 90}, WARN, "memory 90 °C, limit 95 °C", 90, 95, id="memory within margin"
        ),
        pytest.param(
            "gpu.temperature",
            {"margin": 4, "mem_temp": 94},
            WARN,
            "memory 94 °C, limit 95 °C",
            94,
            95,
            id="memory nearer than core",
        ),
        pytest.param(
            "gpu.throttle_hw",
            {"throttle": [0x48, 0x1, 0x48]},
            WARN,
            "hardware thermal slowdown, 32 °C, in 2 of 3 readings",
            0x48,
            0,
            id="slowdown in some looks",
        ),
        pytest.param(
            "gpu.throttle_hw",
            {"throttle": [0x80, 0x80]},
            WARN,
            "hardware power brake, 32 °C, in 2 of 2 readings",
            0x80,
            0,
            id="slowdown in both looks",
        ),
        pytest.param(
            "gpu.throttle_hw",
            {"throttle": [0x8], "temp": None},
            WARN,
            "hardware slowdown, in 1 of 1 readings",
            0x8,
            0,
            id="slowdown in the only look",
        ),
        pytest.param(
            "gpu.throttle_hw",
            {"throttle": 0x8},
            WARN,
            "hardware slowdown, 32 °C, in 1 of 1 readings",
            0x8,
            0,
            id="slowdown, no list",
        ),
        pytest.param(
            "gpu.throttle_hw",
            {"throttle": [0x8, 0xC8, 0x1]},
            WARN,
            "hardware thermal slowdown, hardware power brake, 32 °C, in 2 of 3 readings",
            0xC8,
            0,
            id="the newest slowdown is told",
        ),
        pytest.param(
            "gpu.throttle_sw",
            {"throttle": [0x1, 0x21]},
            WARN,
            "thermal slowdown by the driver",
            0x20,
            0,
            id="slowdown by the driver",
        ),
        pytest.param(
            "gpu.throttle_sw",
            {"throttle": 0x20},
            WARN,
            "thermal slowdown by the driver",
            0x20,
            0,
            id="the same, no list",
        ),
    ],
)
def test_a_sick_gpu_is_told_with_what_was_seen_and_what_was_wanted(
    check: str, changes: dict[str, Any], status: Status, message: str, value: Any, expected: Any
) -> None:
    (found,) = judged(check, {f"gpu1__{name}": fact for name, fact in changes.items()} | pages(check, changes))

    assert (found.status, found.message, found.gpu) == (status, f"{GPU}: {message}", 1)
    assert (found.value, found.expected) == (value, expected)
    assert (found.hint, found.action) == (CHECKS[check].remedy, CHECKS[check].action.value)


def pages(check: str, changes: dict[str, Any]) -> dict[str, Any]:
    """What all GPUs tell of retired pages where one of them is to: those before Ampere."""
    if check != "gpu.retired_pages":
        return {}
    told = {"retired_pending": 0, "retired": [0, 0]}
    return {
        f"gpu{i}__{name}": changes.get(name, value) if i == 1 else value
        for i in range(8)
        for name, value in told.items()
    }


@pytest.mark.parametrize(
    ("retired", "status"),
    [
        pytest.param([15, 0], None, id="at the limit of one reason"),
        pytest.param([16, 0], WARN, id="beyond it, single bit errors"),
        pytest.param([0, 16], WARN, id="beyond it, double bit errors"),
        pytest.param([15, 15], None, id="each at its limit"),
        pytest.param([59, 0], WARN, id="below the limit of all"),
        pytest.param([30, 30], FAIL, id="at the limit of all"),
    ],
)
def test_retired_pages_are_counted(retired: list[int], status: Status | None) -> None:
    (found,) = judged("gpu.retired_pages", pages("gpu.retired_pages", {"retired": retired}))

    if status is None:
        assert found.status is PASS
        return
    assert (found.status, found.gpu, found.value) == (status, 1, retired)
    assert found.message == f"{GPU}: {sum(retired)} memory pages retired"
    assert (found.action, found.hint) == ("RMA", CHECKS["gpu.sram_ecc"].remedy)


@pytest.mark.parametrize("count", [1, 3])
def test_uncorrected_errors_that_were_contained_only_warn(count: int) -> None:
    (found,) = judged("gpu.ecc_uncorrected", {"gpu1__ecc_unc": count})

    assert (found.status, found.gpu, found.value, found.expected) == (WARN, 1, count, 0)
    assert found.message == f"{GPU}: {count} uncorrected memory errors, contained"
    assert found.action == "NONE"
    assert found.hint == "Only the program with the error died; a reset, when convenient, replaces the bad memory"


def test_a_temperature_without_a_limit_is_unknown() -> None:
    limits = {**OLD, "temp": 99, "temp_max": None, "temp_slowdown": None, "mem_temp_max": None}
    (found,) = judged("gpu.temperature", {f"gpu1__{name}": value for name, value in limits.items()})

    assert (found.status, found.gpu, found.value) == (Status.UNKNOWN, 1, 99)
    assert found.message == f"{GPU}: 99 °C, but no limit could be read"


@pytest.mark.parametrize(
    ("check", "changes", "said"),
    [
        pytest.param("gpu.ecc_uncorrected", {"ecc_unc": 0}, "no uncorrected memory errors on 8 GPUs", id="uncorrected"),
        pytest.param(
            "gpu.ecc_corrected", {"ecc_cor": 20_000_000}, "few corrected memory errors on 8 GPUs", id="corrected"
        ),
        pytest.param(
            "gpu.sram_ecc", {"sram": {"unc": 4, "threshold": 0}}, "SRAM of 8 GPUs is within the limit", id="sram"
        ),
        pytest.param(
            "gpu.remap_total",
            {"rows": {"max": 0, "high": 1, "partial": 9, "low": 0, "none": 0}},
            "spare rows in all banks of 8 GPUs",
            id="rows",
        ),
        pytest.param(
            "gpu.remap_pending", {"remapped": [9, 9, 0, 1]}, "no row remapping pending on 8 GPUs", id="pending"
        ),
        pytest.param(
            "gpu.remap_failure", {"remapped": [9, 9, 1, 0]}, "no row remapping failed on 8 GPUs", id="failure"
        ),
        pytest.param("gpu.ecc_mode", {"ecc_mode": [1, 1]}, "default ECC mode on 8 GPUs", id="ecc"),
        pytest.param(
            "gpu.ecc_mode", {"ecc_mode": [0, 0], "ecc_default": 0}, "default ECC mode on 8 GPUs", id="a board without"
        ),
        pytest.param(
            "gpu.ecc_mode", {"ecc_mode": [0, 0], "ecc_default": None}, "default ECC mode on 8 GPUs", id="not told"
        ),
        pytest.param("gpu.repair_pending", {"repair": [0, 0]}, "no repair pending on 8 GPUs", id="repair"),
        pytest.param(
            "gpu.temperature", {**OLD, "temp": 84, "mem_temp": 89}, "8 GPUs below their limits", id="below the margins"
        ),
        pytest.param(
            "gpu.temperature", {"margin": 6, "mem_temp": None}, "8 GPUs below their limits", id="a margin that is left"
        ),
        pytest.param("gpu.throttle_hw", {"throttle": [0x1, 0x20, 0x4]}, "no hardware slowdown on 8 GPUs", id="clocks"),
        pytest.param("gpu.throttle_sw", {"throttle": [0x48, 0x4]}, "no thermal slowdown on 8 GPUs", id="heat"),
    ],
)
def test_at_its_limit_a_gpu_is_still_well(check: str, changes: dict[str, Any], said: str) -> None:
    found = judged(check, {f"gpu1__{name}": fact for name, fact in changes.items()})

    assert [(f.status, f.message) for f in found] == [(PASS, said)]


@pytest.mark.parametrize(
    ("check", "changes", "limit", "before", "after"),
    [
        pytest.param("gpu.ecc_uncorrected", {"gpu1__ecc_unc": 9}, {"fail": 9}, FAIL, WARN, id="uncorrected"),
        pytest.param("gpu.ecc_corrected", {"gpu1__ecc_cor": 10**9}, {"warn": 10**9}, WARN, PASS, id="corrected"),
        pytest.param("gpu.sram_ecc", {"gpu1__sram": {"unc": 7, "threshold": 0}}, {"warn": 7}, WARN, PASS, id="sram"),
        pytest.param("gpu.temperature", {"gpu1__margin": 3}, {"margin": 2}, WARN, PASS, id="margin"),
        pytest.param(
            "gpu.retired_pages",
            pages("gpu.retired_pages", {"retired": [20, 0]}),
            {"warn": 20},
            WARN,
            PASS,
            id="pages that warn",
        ),
        pytest.param(
            "gpu.retired_pages",
            pages("gpu.retired_pages", {"retired": [20, 0]}),
            {"fail": 20},
            WARN,
            FAIL,
            id="pages that fail",
        ),
    ],
)
def test_a_limit_of_the_cluster_file_takes_the_place_of_ours(
    check: str, changes: dict[str, Any], limit: dict[str, float], before: Status, after: Status
) -> None:
    assert judged(check, changes)[0].status is before
    assert judged(check, changes, **limit)[0].status is after
