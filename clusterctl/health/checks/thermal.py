"""Temperature and power of GPUs before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.check import cluster_check, node_check
from clusterctl.health.checks import compare, gpus
from clusterctl.health.checks.throttle import COOLING
from clusterctl.health.model import Action, Outcome, Status, fail, unknown, warn
from clusterctl.health.symptom import Symptom
from clusterctl.health.vendors import JUDGED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from clusterctl.health.check import ClusterView, View

_FAMILY = "GPU temperature, power, clocks"


@node_check(
    name="gpu.temperature",
    family=_FAMILY,
    source=(
        "NVML margin to the limit (nvmlDeviceGetMarginTemperature, field 196; Ada and later), else temperature against "
        "the thresholds GPU_MAX (else SLOWDOWN) and MEM_MAX; of AMD junction (else edge) and memory against hwmon's "
        "`crit`"
    ),
    threshold="below the GPU's own limit; WARN within `margin` degrees of it; UNKNOWN where no limit can be read",
    severity="FAIL",
    remedy=COOLING,
    action=Action.CHECK_POWER_COOLING,
    gpu=True,
    vendors=JUDGED,
    thresholds={"margin": 5.0},
)
def temperature(view: View) -> Iterable[Outcome]:
    """Core and memory are cooler than the GPU's own limits."""
    margin = view.limit("margin")

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        left = {"core": _core_left(device, value), "memory": _memory_left(device)}
        margins = {part: degrees for part, degrees in left.items() if degrees is not None}
        if not margins:
            text = f"{gpus.label(device)}: {value} °C, and no limit that could be read"
            return unknown(text, gpu=device["index"], value=value)
        part = min(margins, key=lambda name: margins[name])
        if margins[part] > margin:
            return None
        degrees = value if part == "core" else gpus.value(device, "mem_temp")
        say = fail if margins[part] <= 0 else warn
        limit = degrees + margins[part]
        message = f"{gpus.label(device)}: {part} {degrees:.0f} °C, limit {limit:.0f} °C"
        return say(message, gpu=device["index"], value=degrees, expected=limit)

    return gpus.judge_each(view, "temp", judge, "{n} GPUs below their limits")


def _core_left(device: gpus.Device, degrees: float) -> float | None:
    """Return by how many degrees a GPU may still warm up; `None` where it does not tell."""
    margin = gpus.value(device, "margin")
    if margin is not None:
        return float(margin - (gpus.value(device, "tlimit_gpu_max") or 0))
    limit = gpus.value(device, "temp_max") or gpus.value(device, "temp_slowdown")
    return float(limit - degrees) if limit else None


def _memory_left(device: gpus.Device) -> float | None:
    degrees, limit = gpus.value(device, "mem_temp"), gpus.value(device, "mem_temp_max")
    return float(limit - degrees) if degrees and limit else None


@cluster_check(
    name="gpu.power_cap",
    family=_FAMILY,
    source="enforced power limit, as a share of the board's default: NVML, hwmon of AMD (first die of a card)",
    threshold="the same share on all GPUs of one board; a cap on all of them is nobody's fault",
    severity="WARN",
    remedy=(
        "Set the same power limit on all GPUs (`sudo nvidia-smi -pl WATTS`, `sudo amd-smi set --power-cap WATTS`), or "
        "leave it where it is on purpose everywhere"
    ),
    action=Action.FIX_CONFIG,
    gpu=True,
    vendors=JUDGED,
)
def power_cap(view: ClusterView) -> Iterable[Outcome]:
    """All GPUs of a board may draw the same power. A cap is fine; one GPU capped alone is not."""
    return compare.compare_gpus(view, _share, "power limit", lambda share: f"{share} % of its default")


def _share(device: gpus.Device) -> int | None:
    watts, usual = gpus.value(device, "power_limit_w"), gpus.value(device, "power_default_w")
    return round(100 * watts / usual) if watts and usual else None


@cluster_check(
    name="gpu.temperature_outlier",
    family=_FAMILY,
    source="core temperature of all GPUs of one board: NVML, hwmon of AMD",
    threshold="less than `warn` degrees above the median, and within three deviations (MAD)",
    severity="WARN",
    remedy=COOLING,
    action=Action.CHECK_POWER_COOLING,
    gpu=True,
    vendors=JUDGED,
    thresholds={"warn": 15.0, "floor": 60.0},
)
def temperature_outlier(view: ClusterView) -> Iterable[Outcome]:
    """No GPU is far hotter than its like; only GPUs above `floor` degrees are looked at."""
    return compare.find_gpu_outliers(view, "temp", "°C")


def sign(gpu: Mapping[str, Any], lasting: float) -> Symptom | None:
    """Return what the temperatures of a sample say of a GPU in a run, where it tells its limits in samples."""
    for part, key in (("core", "temp"), ("memory", "mem_temp")):
        degrees, limit = gpu.get(f"{key}_c"), gpu.get(f"{key}_limit_c")
        if degrees is not None and limit and degrees >= limit:
            return Symptom(
                gpu=int(gpu["gpu"]),
                check="gpu.temperature",
                status=Status.WARN,
                words=f"{part} at its limit of {limit:.0f} °C",
                action=Action.CHECK_POWER_COOLING,
                lasting=lasting,
                detail=f"{degrees:.0f} °C",
            )
    return None


CHECKS = (temperature, power_cap, temperature_outlier)
