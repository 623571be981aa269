"""Checks of GPU temperatures, power limits and reduced clocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clusterctl.health.check import CheckedCluster, cluster_check, remedy
from clusterctl.health.checks import comparison, gpu_facts
from clusterctl.health.findings import AMD, JUDGED, Action, Outcome, Status, Symptom, fail, skip, unknown
from clusterctl.health.gpu_library_errors import UNSUPPORTED

_FAMILY = "GPU temperature, power, clocks"
COOLING = "Check fans, air flow and power supply of the node; low clocks on one GPU slow the whole run"

HW_SLOWDOWN, HW_THERMAL, HW_POWER_BRAKE = 0x8, 0x40, 0x80
SW_THERMAL = 0x20
_HARDWARE_BITS = {
    HW_SLOWDOWN: "hardware slowdown",
    HW_THERMAL: "hardware thermal slowdown",
    HW_POWER_BRAKE: "hardware power brake",
}
"""Bit of an NVML clock event reason to the name of the reason, for reasons that come from hardware. Each of them also
sets `HW_SLOWDOWN`."""
_CAUSES = HW_THERMAL | HW_POWER_BRAKE


def format_hardware_reasons(bits: int) -> str:
    """Return the names of the hardware reasons in NVML's clock event bits, for messages; "" if there is none."""
    fine = [name for bit, name in _HARDWARE_BITS.items() if bits & bit and bit != HW_SLOWDOWN]
    return ", ".join(fine) or (_HARDWARE_BITS[HW_SLOWDOWN] if bits & HW_SLOWDOWN else "")


def _list_readings(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]


@remedy(Action.CHECK_POWER_COOLING, COOLING)
@gpu_facts.gpu_check("gpu.throttle_hw", _FAMILY, "throttle", "no hardware slowdown on {n} GPUs", severity="WARN")
def check_hardware_throttling(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """Hardware does not reduce the clocks of a GPU: the slowest GPU sets the speed of the run.

    Source: NVML clock event reasons, bits 0x8, 0x40, 0x80; up to three readings in a quarter of a second
    Healthy: these bits are not set. They are WARN, not FAIL, because reduced clocks of an idle GPU prove nothing about
        its speed under load. 0x200 (board limit) and 0x400 (reliability) are normal for a GPU at its highest clock
    """
    samples = _list_readings(gpu.value)
    slowed = [bits for bits in samples if format_hardware_reasons(bits)]
    if not slowed:
        return None
    degrees = gpu.get("temp")
    warmth = f", {degrees} °C" if degrees is not None else ""
    message = f"{format_hardware_reasons(slowed[-1])}{warmth}, in {len(slowed)} of {len(samples)} readings"
    return gpu.warn(message, value=slowed[-1], expected=0)


@remedy(Action.CHECK_POWER_COOLING, COOLING)
@gpu_facts.gpu_check("gpu.throttle_sw", _FAMILY, "throttle", "no thermal slowdown on {n} GPUs", severity="WARN")
def check_driver_throttling(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """The driver does not reduce the clocks of a GPU because of heat.

    Source: NVML clock event reasons, bit 0x20
    Healthy: this bit is not set. The bits of software power caps are ignored, because they are normal under load
    """
    if not any(bits & SW_THERMAL for bits in _list_readings(gpu.value)):
        return None
    return gpu.warn("thermal slowdown by the driver", value=SW_THERMAL, expected=0)


@remedy(Action.CHECK_POWER_COOLING, COOLING)
@cluster_check("gpu.throttle_outlier", _FAMILY, gpu=True)
def check_throttling_outliers(cluster: CheckedCluster) -> Iterable[Outcome]:
    """Heat or power does not reduce the clocks of one GPU only, compared with GPUs of the same board.

    A constant power brake is a fault of the node.

    Source: NVML clock event reasons of all GPUs of one board, bits 0x40 and 0x80, in every reading
    Healthy: the bits are equal on the GPUs of one board. FAIL for a GPU with a bit that most of the others, on at least
        two nodes, do not have
    """
    return comparison.compare_gpus(
        cluster, _read_constant_causes, "slowdown", _format_reasons, say=fail, at_least_nodes=2
    )


def _read_constant_causes(device: gpu_facts.Device) -> int | None:
    """Return the bits of heat and power that are set in every reading; 0 if there is only one reading."""
    value = gpu_facts.read_value(device, "throttle")
    if value is None:
        return None
    samples = _list_readings(value)
    causes = _CAUSES if len(samples) > 1 else 0
    for bits in samples:
        causes &= bits
    return causes


def _format_reasons(bits: int) -> str:
    return format_hardware_reasons(bits) or "none"


def find_throttle_symptom(gpu: int, bits: int, degrees: float | None, lasting: float) -> Symptom | None:
    """Return the symptom of reduced clocks, or `None`.

    Args:
        gpu: Index of the GPU.
        bits: Clock event reasons of NVML.
        degrees: Temperature in degrees Celsius.
        lasting: Seconds that the symptom must last before clusterctl reports it.
    """
    hard = format_hardware_reasons(bits)
    if not hard and not bits & SW_THERMAL:
        return None
    check, words = ("gpu.throttle_hw", hard) if hard else ("gpu.throttle_sw", "thermal slowdown")
    detail, action = f"{degrees:.0f} °C" if degrees is not None else "", Action.CHECK_POWER_COOLING
    return Symptom(check, Status.WARN, words, action, gpu=gpu, min_duration_s=lasting, detail=detail)


# --- Temperature and power of GPUs before a run.


@remedy(Action.CHECK_POWER_COOLING, COOLING)
@gpu_facts.gpu_check(
    "gpu.temperature", _FAMILY, "temp", "{n} GPUs below their limits", vendors=JUDGED, thresholds={"margin": 5.0}
)
def check_temperatures(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """Core and memory of a GPU are cooler than its limits.

    Source: NVML margin to the limit (nvmlDeviceGetMarginTemperature, field 196; Ada and later), else temperature
        and the thresholds GPU_MAX (else SLOWDOWN) and MEM_MAX; of AMD the temperatures of junction (else edge) and
        memory, and hwmon's `crit`
    Healthy: more than `margin` degrees below the limit of the GPU. WARN within `margin` degrees of the limit, FAIL from
        the limit on, UNKNOWN if no limit can be read, SKIP if the GPU or its driver has none
    """
    left = {"core": _core_margin(gpu.device, gpu.value), "memory": _memory_margin(gpu.device)}
    margins = {part: degrees for part, degrees in left.items() if degrees is not None}
    if not margins:
        limits = ("temp_max",) if gpu.device["vendor"] == AMD else ("margin", "temp_max", "temp_slowdown")
        if all(gpu.device["err"].get(field) == UNSUPPORTED for field in limits):
            return skip(f"{gpu_facts.describe_gpu(gpu.device)}: {gpu.value} °C, and the GPU has no limit")
        message = f"{gpu_facts.describe_gpu(gpu.device)}: {gpu.value} °C, but no limit could be read"
        return unknown(message, gpu=gpu.index, value=gpu.value)
    part = min(margins, key=lambda name: margins[name])
    if margins[part] > gpu.limit("margin"):
        return None
    degrees = gpu.value if part == "core" else gpu.get("mem_temp")
    say = gpu.fail if margins[part] <= 0 else gpu.warn
    limit = degrees + margins[part]
    return say(f"{part} {degrees:.0f} °C, limit {limit:.0f} °C", value=degrees, expected=limit)


def _core_margin(device: gpu_facts.Device, degrees: float) -> float | None:
    """Return how many degrees a GPU is below its limit; `None` if the GPU reports no limit."""
    margin = gpu_facts.read_value(device, "margin")
    if margin is not None:
        return float(margin - (gpu_facts.read_value(device, "tlimit_gpu_max") or 0))
    limit = gpu_facts.read_value(device, "temp_max") or gpu_facts.read_value(device, "temp_slowdown")
    return float(limit - degrees) if limit else None


def _memory_margin(device: gpu_facts.Device) -> float | None:
    degrees, limit = gpu_facts.read_value(device, "mem_temp"), gpu_facts.read_value(device, "mem_temp_max")
    return float(limit - degrees) if degrees and limit else None


@remedy(
    Action.FIX_CONFIG,
    "Set the same power limit on all GPUs (`sudo nvidia-smi -pl WATTS`, `sudo amd-smi set --power-cap WATTS`)",
)
@cluster_check("gpu.power_cap", _FAMILY, severity="WARN", gpu=True, vendors=JUDGED)
def check_power_caps(cluster: CheckedCluster) -> Iterable[Outcome]:
    """All GPUs of a board have the same power limit.

    Source: enforced power limit, as a share of the board's default: NVML, hwmon of AMD (first die of a card)
    Healthy: the same share on all GPUs of one board; a reduced limit on all of them is healthy
    """
    return comparison.compare_gpus(cluster, _read_power_share, "power limit", lambda share: f"{share} % of its default")


def _read_power_share(device: gpu_facts.Device) -> int | None:
    watts, usual = gpu_facts.read_value(device, "power_limit_w"), gpu_facts.read_value(device, "power_default_w")
    return round(100 * watts / usual) if watts and usual else None


@remedy(Action.CHECK_POWER_COOLING, COOLING)
@cluster_check(
    "gpu.temperature_outlier",
    _FAMILY,
    severity="WARN",
    gpu=True,
    vendors=JUDGED,
    thresholds={"warn": 15.0, "floor": 60.0},
)
def check_temperature_outliers(cluster: CheckedCluster) -> Iterable[Outcome]:
    """No GPU is far hotter than others of the same board.

    Source: core temperature of all GPUs of one board: NVML, hwmon of AMD
    Healthy: less than `warn` degrees above the median, or within three deviations (MAD), or below `floor` degrees
    """
    return comparison.find_gpu_outliers(cluster, "temp", "°C")


def find_temperature_symptom(gpu: Mapping[str, Any], lasting: float) -> Symptom | None:
    """Return the symptom of a GPU at a temperature limit, or `None`; some samples contain no limits."""
    for part, key in (("core", "temp"), ("memory", "mem_temp")):
        degrees, limit = gpu.get(f"{key}_c"), gpu.get(f"{key}_limit_c")
        if degrees is not None and limit and degrees >= limit:
            words, detail = f"{part} at its limit of {limit:.0f} °C", f"{degrees:.0f} °C"
            action, index = Action.CHECK_POWER_COOLING, int(gpu["gpu"])
            return Symptom(
                "gpu.temperature", Status.WARN, words, action, gpu=index, min_duration_s=lasting, detail=detail
            )
    return None
