"""Clocks that are held down: what NVML's clock event bits mean, before a run and during it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.check import cluster_check, node_check
from clusterctl.health.checks import compare, gpus
from clusterctl.health.model import Action, Outcome, Status, fail, warn
from clusterctl.health.symptom import Symptom

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.health.check import ClusterView, View

_FAMILY = "GPU temperature, power, clocks"
COOLING = "Check fans, air flow and power supply of the node; low clocks on one GPU slow the whole run"

HW_SLOWDOWN, HW_THERMAL, HW_POWER_BRAKE = 0x8, 0x40, 0x80
SW_THERMAL = 0x20
HW_BITS = {
    HW_SLOWDOWN: "hardware slowdown",
    HW_THERMAL: "hardware thermal slowdown",
    HW_POWER_BRAKE: "hardware power brake",
}
"""Of NVML's bits, those by which hardware slows the clock. The general one comes with each of the others."""
_CAUSES = HW_THERMAL | HW_POWER_BRAKE


def name_reasons(bits: int) -> str:
    """Name the hardware reasons in a set of clock event bits; the general bit only where no finer one is set."""
    fine = [name for bit, name in HW_BITS.items() if bits & bit and bit != HW_SLOWDOWN]
    return ", ".join(fine) or (HW_BITS[HW_SLOWDOWN] if bits & HW_SLOWDOWN else "")


def _samples(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]


@node_check(
    name="gpu.throttle_hw",
    family=_FAMILY,
    source="NVML clock event reasons, bits 0x8, 0x40, 0x80; up to three looks in a quarter of a second",
    threshold=(
        "not set. An idle GPU that is held down has yet to prove that it is slow, so this alone never fails a node; "
        "0x200 (board limit) and 0x400 (reliability) are how a GPU at its highest clock looks"
    ),
    severity="WARN",
    remedy=COOLING,
    action=Action.CHECK_POWER_COOLING,
    gpu=True,
)
def throttle_hw(view: View) -> Iterable[Outcome]:
    """Hardware does not hold the clocks down. The slowest GPU sets the speed of the run."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        seen = [bits for bits in _samples(value) if name_reasons(bits)]
        if not seen:
            return None
        degrees = gpus.value(device, "temp")
        warmth = f", {degrees} °C" if degrees is not None else ""
        looks = f", in {len(seen)} of {len(_samples(value))} looks"
        message = f"{gpus.label(device)}: {name_reasons(seen[-1])}{warmth}{looks}"
        return warn(message, gpu=device["index"], value=seen[-1], expected=0)

    return gpus.judge_each(view, "throttle", judge, "no hardware slowdown on {n} GPUs")


@node_check(
    name="gpu.throttle_sw",
    family=_FAMILY,
    source="NVML clock event reasons, bit 0x20",
    threshold="not set (power caps by software are normal under load and not looked at)",
    severity="WARN",
    remedy=COOLING,
    action=Action.CHECK_POWER_COOLING,
    gpu=True,
)
def throttle_sw(view: View) -> Iterable[Outcome]:
    """The driver does not hold the clocks down for heat."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if not any(bits & SW_THERMAL for bits in _samples(value)):
            return None
        message = f"{gpus.label(device)}: thermal slowdown by the driver"
        return warn(message, gpu=device["index"], value=SW_THERMAL, expected=0)

    return gpus.judge_each(view, "throttle", judge, "no thermal slowdown on {n} GPUs")


@cluster_check(
    name="gpu.throttle_outlier",
    family=_FAMILY,
    source="NVML clock event reasons of all GPUs of one model, bits 0x40 and 0x80, in every look",
    threshold="set on no GPU alone: FAIL where most of its like, on at least two nodes, are free of it",
    severity="FAIL",
    remedy=COOLING,
    action=Action.CHECK_POWER_COOLING,
    gpu=True,
)
def throttle_outlier(view: ClusterView) -> Iterable[Outcome]:
    """No GPU is held down for heat or power where its like are not: a constant power brake is a fault of the node."""
    return compare.compare_gpus(view, _constant, "slowdown", _named, say=fail, at_least_nodes=2)


def _constant(device: gpus.Device) -> int | None:
    """Return the causes that were there in every look; a single look says nothing that lasts."""
    value = gpus.value(device, "throttle")
    if value is None:
        return None
    samples = _samples(value)
    causes = _CAUSES if len(samples) > 1 else 0
    for bits in samples:
        causes &= bits
    return causes


def _named(bits: int) -> str:
    return name_reasons(bits) or "none"


def sign(gpu: int, bits: int, degrees: float | None, lasting: float) -> Symptom | None:
    """Return what a sample's bits say of a GPU in a run; `lasting` is how many seconds make it worth a word."""
    hard = name_reasons(bits)
    if not hard and not bits & SW_THERMAL:
        return None
    return Symptom(
        gpu=gpu,
        check="gpu.throttle_hw" if hard else "gpu.throttle_sw",
        status=Status.WARN,
        words=hard or "thermal slowdown",
        action=Action.CHECK_POWER_COOLING,
        lasting=lasting,
        detail=f"{degrees:.0f} °C" if degrees is not None else "",
    )


CHECKS = (throttle_hw, throttle_sw, throttle_outlier)
