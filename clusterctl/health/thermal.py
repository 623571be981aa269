"""Temperature, power, and clocks that are held down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health import compare, gpus
from clusterctl.health.check import ClusterView, View, cluster_check, node_check
from clusterctl.health.model import Action, Outcome, failed, warned

if TYPE_CHECKING:
    from collections.abc import Iterable

_FAMILY = "GPU temperature, power, clocks"
_COOLING = "Check fans, air flow and power supply of the node; low clocks on one GPU slow the whole run"

HW_BITS = {0x8: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "hardware power brake"}
SW_THERMAL = 0x20


def reasons(bits: int) -> str:
    """Name the hardware reasons in a set of clock event bits; the general bit only where no finer one is set."""
    fine = [name for bit, name in HW_BITS.items() if bits & bit and bit != 0x8]
    return ", ".join(fine) or (HW_BITS[0x8] if bits & 0x8 else "")


@node_check(
    name="gpu.temperature",
    family=_FAMILY,
    source="NVML temperature of core and memory, thresholds GPU_MAX and MEM_MAX (else SLOWDOWN)",
    threshold="below the GPU's own limit; WARN within `margin` degrees of it",
    severity="FAIL",
    remedy=_COOLING,
    action=Action.CHECK_POWER_COOLING,
    gpu=True,
    thresholds={"margin": 5.0},
)
def temperature(view: View) -> Iterable[Outcome]:
    """Core and memory are cooler than the GPU's own limits."""
    margin = view.limit("margin")

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        known = device["v"]
        pairs = [("core", value, known.get("temp_max") or known.get("temp_slowdown"))]
        pairs.append(("memory", known.get("mem_temp"), known.get("mem_temp_max")))
        for part, degrees, limit in pairs:
            if not degrees or not limit or degrees < limit - margin:
                continue
            say = failed if degrees >= limit else warned
            return say(
                f"{gpus.label(device)}: {part} {degrees} °C, limit {limit} °C",
                gpu=device["index"],
                value=degrees,
                expected=limit,
            )
        return None

    return gpus.each(view, "temp", judge, "{n} GPUs below their limits")


@node_check(
    name="gpu.throttle_hw",
    family=_FAMILY,
    source="NVML clock event reasons, bits 0x8, 0x40, 0x80; up to three looks",
    threshold="not set; FAIL where set in every look, WARN where set in some",
    severity="FAIL",
    remedy=_COOLING,
    action=Action.CHECK_POWER_COOLING,
    gpu=True,
)
def throttle_hw(view: View) -> Iterable[Outcome]:
    """Hardware does not hold the clocks down. The slowest GPU sets the speed of the run."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        samples = value if isinstance(value, list) else [value]
        seen = [bits for bits in samples if reasons(bits)]
        if not seen:
            return None
        say = failed if len(seen) == len(samples) and len(samples) > 1 else warned
        degrees = device["v"].get("temp")
        warmth = f", {degrees} °C" if degrees is not None else ""
        return say(
            f"{gpus.label(device)}: {reasons(seen[-1])}{warmth}", gpu=device["index"], value=seen[-1], expected=0
        )

    return gpus.each(view, "throttle", judge, "no hardware slowdown on {n} GPUs")


@node_check(
    name="gpu.throttle_sw",
    family=_FAMILY,
    source="NVML clock event reasons, bit 0x20",
    threshold="not set (power caps by software are normal under load and not looked at)",
    severity="WARN",
    remedy=_COOLING,
    action=Action.CHECK_POWER_COOLING,
    gpu=True,
)
def throttle_sw(view: View) -> Iterable[Outcome]:
    """The driver does not hold the clocks down for heat."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        samples = value if isinstance(value, list) else [value]
        if not any(bits & SW_THERMAL for bits in samples):
            return None
        return warned(
            f"{gpus.label(device)}: thermal slowdown by the driver", gpu=device["index"], value=SW_THERMAL, expected=0
        )

    return gpus.each(view, "throttle", judge, "no thermal slowdown on {n} GPUs")


@cluster_check(
    name="gpu.power_cap",
    family=_FAMILY,
    source="NVML enforced power limit",
    threshold="the same on all GPUs of one model",
    severity="WARN",
    remedy=(
        "Set the same power limit on all GPUs (`sudo nvidia-smi -pl WATTS`), or leave it where it"
        " is on purpose everywhere"
    ),
    action=Action.FIX_CONFIG,
    gpu=True,
)
def power_cap(view: ClusterView) -> Iterable[Outcome]:
    """All GPUs of a model may draw the same power. A cap is fine; one GPU capped alone is not."""
    return compare.gpu_categories(view, "power_limit_w", "power limit", lambda watts: f"{watts:.0f} W")


@cluster_check(
    name="gpu.temperature_outlier",
    family=_FAMILY,
    source="NVML core temperature of all GPUs of one model",
    threshold="less than `warn` degrees above the median, and within three deviations (MAD)",
    severity="WARN",
    remedy=_COOLING,
    action=Action.CHECK_POWER_COOLING,
    gpu=True,
    thresholds={"warn": 15.0, "floor": 60.0},
)
def temperature_outlier(view: ClusterView) -> Iterable[Outcome]:
    """No GPU is far hotter than its like; only GPUs above `floor` degrees are looked at."""
    return compare.gpu_outliers(view, "temp", "°C")


CHECKS = (temperature, throttle_hw, throttle_sw, power_cap, temperature_outlier)
