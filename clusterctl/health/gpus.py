"""Reading one GPU's facts: values, NVML's errors, and folding many GPUs into few outcomes.

A device of `groups.nvml.data.devices` is `{"index", "v": {field: value}, "err": {field: NVML return code}}`. The codes
and what they mean are those of NVIDIA's `nvml.h`; what we make of each is in `docs/health.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.model import Outcome, passed, skipped, unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from clusterctl.health.check import View

Device = dict[str, Any]

NOT_SUPPORTED = frozenset({3, 13, 25})
"""Not supported, no such function in this driver, argument version unknown to this driver: the fact does not apply."""

NO_PERMISSION = 4
BROKEN = frozenset({15, 16, 28, 999})
"""GPU is lost, reset required, GPU not found, unknown error: the device itself is in trouble."""

ERROR_NAMES: dict[int, str] = {
    1: "not initialised",
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    8: "insufficient power",
    9: "driver not loaded",
    10: "timed out",
    11: "interrupt problem",
    12: "library not found",
    13: "function not in this driver",
    14: "corrupted infoROM",
    15: "GPU is lost",
    16: "GPU requires reset",
    17: "operating system blocked the request",
    18: "driver/library version mismatch",
    19: "in use",
    20: "insufficient memory",
    25: "version not in this driver",
    28: "GPU not found",
    29: "invalid state",
    999: "unknown error",
}


def error_name(code: int) -> str:
    """Say an NVML return code in words."""
    return ERROR_NAMES.get(code, f"NVML error {code}")


def devices(view: View) -> list[Device]:
    """Return the GPUs that matter: the declared indices, the first N, or all."""
    found: list[Device] = view.group("nvml").data.get("devices") or []
    declared = view.expected.gpus
    if isinstance(declared, tuple):
        return [d for d in found if d["index"] in declared]
    return found if declared is None else [d for d in found if d["index"] < declared]


def present(view: View) -> bool:
    """Tell whether there is any sign of an NVIDIA GPU or its driver on the node."""
    driver = view.group("driver").data
    return bool(driver.get("pci") or driver.get("module") or devices(view) or view.group("nvml").status == "timeout")


def gate(view: View) -> Outcome | None:
    """Return why a GPU check has nothing to judge, or `None` when it has."""
    if view.expected.count == 0:
        return skipped("no GPUs declared")
    if view.expected.count is None and not present(view):
        if view.group("driver").status != "ok":
            return unknown(f"could not look for GPUs: {view.group('driver').reason}")
        return skipped("no GPU here and none declared")
    return None


def nvml_gate(view: View) -> Outcome | None:
    """Return why NVML's answers cannot be judged, or `None`; who is to blame is another check's business."""
    nvml = view.group("nvml")
    if nvml.status != "ok":
        return unknown(f"NVML did not answer: {nvml.reason or nvml.status}")
    if nvml.data.get("init_error") is not None:
        return unknown(f"NVML could not be used: {error_name(nvml.data['init_error'])}")
    if not devices(view):
        return unknown("NVML shows no GPU")
    return None


def label(device: Device) -> str:
    """Name a GPU for a person: index, and PCI address where known."""
    pci = device.get("v", {}).get("pci")
    return f"GPU {device['index']} ({pci})" if pci else f"GPU {device['index']}"


def each(
    view: View,
    field: str,
    judge: Callable[[Device, Any], Outcome | None],
    healthy: str,
    *,
    skip_errors: Iterable[int] = (),
) -> list[Outcome]:
    """Judge one field of every GPU: adverse outcomes one a GPU, all well folded into one.

    Args:
        view: The node.
        field: Name of the value.
        judge: Says what is wrong with a value; `None` for nothing.
        healthy: What to say when nothing is wrong; `{n}` is filled with the number of GPUs judged.
        skip_errors: More NVML codes that mean "does not apply".
    """
    blocked = nvml_gate(view)
    if blocked is not None:
        return [blocked]
    outcomes: list[Outcome] = []
    judged, blind = 0, dict[str, list[int]]()
    inapplicable = NOT_SUPPORTED | set(skip_errors)
    for device in devices(view):
        if field in device.get("v", {}):
            judged += 1
            said = judge(device, device["v"][field])
            if said is not None:
                outcomes.append(said)
            continue
        code = device.get("err", {}).get(field)
        if code in inapplicable:
            continue
        why = "not read" if code is None else error_name(code)
        blind.setdefault(why, []).append(device["index"])
    outcomes += [unknown(f"{numbers(gpus)}: {why}", value=gpus) for why, gpus in blind.items()]
    if outcomes:
        return outcomes
    return [passed(healthy.format(n=judged))] if judged else [skipped("not supported by this GPU or driver")]


def numbers(gpus: Sequence[int]) -> str:
    """Name GPUs: `GPU 3`, `GPUs 0, 2`."""
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))}"
