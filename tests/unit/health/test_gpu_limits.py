"""Every branch of the checks of a GPU's memory and heat: at its limit, just beyond, in some looks and in all."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.health.judge import judge_node
from clusterctl.health.model import Context, Expectation, Finding, Status
from clusterctl.health.registry import CHECKS
from tests.unit.health.healthy import changed, facts

FAIL, WARN, PASS = Status.FAIL, Status.WARN, Status.PASS
GPU = "GPU 1 (00000000:11:00.0)"


def judged(check: str, changes: dict[str, Any], **thresholds: float) -> list[Finding]:
    context = Context(
        nodes={"n0": Expectation(gpus=8)}, thresholds={f"{check}.{name}": value for name, value in thresholds.items()}
    )
    return judge_node("n0", changed(facts(), **changes), context, [check])


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
            "gpu.ecc_mode", {"ecc_mode": [0, 1]}, WARN, "ECC changes at the next reboot", [0, 1], None, id="ecc on soon"
        ),
        pytest.param(
            "gpu.ecc_uncorrected", {"ecc_unc": 1}, FAIL, "1 uncorrected memory errors", 1, 0.0, id="uncorrected"
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
            "gpu.remap_pending", {"remapped": [0, 0, 1, 0]}, FAIL, "row remapping waits for a reset", 1, 0, id="pending"
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
        pytest.param("gpu.remap_total", {"remapped": [0, 513, 0, 0]}, WARN, "513 rows remapped", 513, 512.0, id="rows"),
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
        pytest.param("gpu.temperature", {"temp": 90}, FAIL, "core 90 °C, limit 90 °C", 90, 90, id="core at its limit"),
        pytest.param("gpu.temperature", {"temp": 89}, WARN, "core 89 °C, limit 90 °C", 89, 90, id="core within margin"),
        pytest.param("gpu.temperature", {"temp": 85}, WARN, "core 85 °C, limit 90 °C", 85, 90, id="core at the margin"),
        pytest.param(
            "gpu.temperature",
            {"temp": 88, "temp_max": None},
            FAIL,
            "core 88 °C, limit 87 °C",
            88,
            87,
            id="core without a limit of its own",
        ),
        pytest.param(
            "gpu.temperature", {"mem_temp": 96}, FAIL, "memory 96 °C, limit 95 °C", 96, 95, id="memory beyond its limit"
        ),
        pytest.param(
            "gpu.temperature", {"mem_temp": 91}, WARN, "memory 91 °C, limit 95 °C", 91, 95, id="memory within margin"
        ),
        pytest.param(
            "gpu.temperature",
            {"temp": None, "mem_temp": 95},
            FAIL,
            "memory 95 °C, limit 95 °C",
            95,
            95,
            id="memory, core not told",
        ),
        pytest.param(
            "gpu.throttle_hw",
            {"throttle": [0x48, 0x1, 0x48]},
            WARN,
            "hardware thermal slowdown, 32 °C",
            0x48,
            0,
            id="slowdown in some looks",
        ),
        pytest.param(
            "gpu.throttle_hw",
            {"throttle": [0x80, 0x80]},
            FAIL,
            "hardware power brake, 32 °C",
            0x80,
            0,
            id="slowdown in both looks",
        ),
        pytest.param(
            "gpu.throttle_hw",
            {"throttle": [0x8], "temp": None},
            WARN,
            "hardware slowdown",
            0x8,
            0,
            id="slowdown in the only look",
        ),
        pytest.param(
            "gpu.throttle_hw", {"throttle": 0x8}, WARN, "hardware slowdown, 32 °C", 0x8, 0, id="slowdown, no list"
        ),
        pytest.param(
            "gpu.throttle_hw",
            {"throttle": [0x8, 0xC8, 0x1]},
            WARN,
            "hardware thermal slowdown, hardware power brake, 32 °C",
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
    good = {f"gpu{index}__retired_pending": 0 for index in range(8)} if check == "gpu.retired_pages" else {}
    (found,) = judged(check, {**good, **{f"gpu1__{name}": fact for name, fact in changes.items()}})

    assert (found.status, found.message, found.gpu) == (status, f"{GPU}: {message}", 1)
    assert (found.value, found.expected) == (value, expected)
    assert (found.hint, found.action) == (CHECKS[check].remedy, CHECKS[check].action.value)


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
        pytest.param("gpu.remap_total", {"remapped": [9, 512, 0, 0]}, "few rows remapped on 8 GPUs", id="rows"),
        pytest.param(
            "gpu.remap_pending", {"remapped": [9, 9, 0, 1]}, "no row remapping pending on 8 GPUs", id="pending"
        ),
        pytest.param(
            "gpu.remap_failure", {"remapped": [9, 9, 1, 0]}, "no row remapping failed on 8 GPUs", id="failure"
        ),
        pytest.param("gpu.ecc_mode", {"ecc_mode": [1, 1]}, "ECC is on, 8 GPUs", id="ecc"),
        pytest.param("gpu.repair_pending", {"repair": [0, 0]}, "no repair pending on 8 GPUs", id="repair"),
        pytest.param(
            "gpu.temperature", {"temp": 84, "mem_temp": 89}, "8 GPUs below their limits", id="below the margins"
        ),
        pytest.param(
            "gpu.temperature",
            {"temp": 99, "temp_max": None, "temp_slowdown": None, "mem_temp": 99, "mem_temp_max": None},
            "8 GPUs below their limits",
            id="no limit is known",
        ),
        pytest.param("gpu.throttle_hw", {"throttle": [0x1, 0x20, 0x4]}, "no hardware slowdown on 8 GPUs", id="clocks"),
        pytest.param("gpu.throttle_sw", {"throttle": [0x48, 0x4]}, "no thermal slowdown on 8 GPUs", id="heat"),
    ],
)
def test_at_its_limit_a_gpu_is_still_well(check: str, changes: dict[str, Any], said: str) -> None:
    found = judged(check, {f"gpu1__{name}": fact for name, fact in changes.items()})

    assert [(f.status, f.message) for f in found] == [(PASS, said)]


@pytest.mark.parametrize(
    ("check", "changes", "limit"),
    [
        pytest.param("gpu.ecc_uncorrected", {"gpu1__ecc_unc": 3}, {"fail": 3}, id="uncorrected"),
        pytest.param("gpu.ecc_corrected", {"gpu1__ecc_cor": 10**9}, {"warn": 10**9}, id="corrected"),
        pytest.param("gpu.sram_ecc", {"gpu1__sram": {"unc": 7, "threshold": 0}}, {"warn": 7}, id="sram"),
        pytest.param("gpu.remap_total", {"gpu1__remapped": [0, 600, 0, 0]}, {"warn": 600}, id="rows"),
        pytest.param("gpu.temperature", {"gpu1__temp": 87}, {"margin": 2}, id="margin"),
    ],
)
def test_a_limit_of_the_cluster_file_takes_the_place_of_ours(
    check: str, changes: dict[str, Any], limit: dict[str, float]
) -> None:
    assert judged(check, changes)[0].status in (WARN, FAIL)
    assert judged(check, changes, **limit)[0].status is PASS
