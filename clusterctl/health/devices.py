"""Whether each GPU is alive, and what the driver itself recommends to do with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health import gpus
from clusterctl.health.check import View, node_check
from clusterctl.health.model import Action, Outcome, failed, passed, unknown, warned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FATAL = {
    14: Action.RMA,
    15: Action.REBOOT_NODE,
    16: Action.RESET_GPU,
    28: Action.REBOOT_NODE,
    8: Action.CHECK_POWER_COOLING,
}
_SUSPECT = frozenset({10, 11, 999})

_RECOVERY = {
    1: ("GPU reset", Action.RESET_GPU),
    2: ("node reboot", Action.REBOOT_NODE),
    3: ("drain P2P", Action.RESET_GPU),
    4: ("drain and reset", Action.RESET_GPU),
    5: ("recover IMEX domain", Action.RESET_GPU),
    6: ("bus reset", Action.RESET_GPU),
    7: ("system reboot", Action.REBOOT_NODE),
}
"""Values of NVML field 230 (driver 570 and later)."""


@node_check(
    name="gpu.lost",
    family="GPU state",
    source="NVML return codes of every call on the GPU",
    threshold=(
        "no call answers lost, reset required, not found, insufficient power, interrupt problem, "
        "timed out or unknown error"
    ),
    severity="FAIL",
    remedy="Reboot the node; if it happens again to the same serial number, have the GPU replaced",
    action=Action.REBOOT_NODE,
    gpu=True,
)
def lost(view: View) -> Iterator[Outcome]:
    """Every GPU answers. A lost GPU has fallen off the bus or needs a reset."""
    blocked = gpus.nvml_gate(view)
    if blocked is not None:
        yield blocked
        return
    sick = False
    for device in gpus.devices(view):
        codes = set(device.get("err", {}).values())
        bad = sorted(codes & set(_FATAL)) or sorted(codes & _SUSPECT)
        if bad:
            sick = True
            action = _FATAL.get(bad[0], Action.REBOOT_NODE)
            yield failed(
                f"{gpus.label(device)}: {gpus.error_name(bad[0])}", gpu=device["index"], value=bad[0], action=action
            )
    if not sick:
        yield passed(f"{len(gpus.devices(view))} GPUs answer")


@node_check(
    name="gpu.recovery_action",
    family="GPU state",
    source="NVML field 230 (driver 570 and later)",
    threshold="none",
    severity="FAIL",
    remedy="Do what the driver recommends: stop all jobs, then `sudo nvidia-smi -r -i N` or reboot",
    action=Action.RESET_GPU,
    gpu=True,
)
def recovery_action(view: View) -> Iterable[Outcome]:
    """The driver's own verdict: it recommends no reset and no reboot.

    Needs no root, unlike the kernel log.
    """

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value == 0:
            return None
        words, action = _RECOVERY.get(value, (f"action {value}", Action.CONTACT_SUPPORT))
        message = f"{gpus.label(device)}: the driver asks for {words}"
        return failed(message, gpu=device["index"], value=value, expected=0, action=action)

    return gpus.each(view, "recovery_action", judge, "no recovery action on {n} GPUs")


@node_check(
    name="gpu.inforom",
    family="GPU state",
    source="NVML nvmlDeviceValidateInforom",
    threshold="valid",
    severity="FAIL",
    remedy="Have the GPU replaced: its infoROM is corrupted",
    action=Action.RMA,
    gpu=True,
)
def inforom(view: View) -> Iterator[Outcome]:
    """The configuration memory of every GPU is intact."""
    corrupted = [d for d in gpus.devices(view) if d.get("err", {}).get("inforom") == 14]
    for device in corrupted:
        yield failed(f"{gpus.label(device)}: corrupted infoROM", gpu=device["index"], value=14)
    if not corrupted:
        yield from gpus.each(view, "inforom", lambda _, __: None, "infoROM of {n} GPUs is valid")


@node_check(
    name="gpu.bad_env",
    family="GPU state",
    source="environment of the job",
    threshold="none of the debugging variables of CUDA set",
    severity="WARN",
    remedy="Unset the variable in `env`, the prologue or the shell's start files",
    action=Action.FIX_CONFIG,
    gpu=True,
    group="host",
)
def bad_env(view: View) -> Iterator[Outcome]:
    """No variable is set that injects a debugger or profiler into CUDA or makes it wait."""
    env = view.group().data.get("env")
    if env is None:
        yield unknown("the environment was not reported")
        return
    found = sorted(name for name in _BAD_ENV if name in env)
    yield warned(f"{', '.join(found)} set", value=found) if found else passed("no debugging variable set")


_BAD_ENV = (
    "NSIGHT_CUDA_DEBUGGER",
    "CUDA_INJECTION32_PATH",
    "CUDA_INJECTION64_PATH",
    "CUDA_AUTO_BOOST",
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
    "CUDA_COREDUMP_FILE",
    "CUDA_DEVICE_WAITS_ON_EXCEPTION",
    "CUDA_PROFILE",
    "COMPUTE_PROFILE",
)


CHECKS = (lost, recovery_action, inforom, bad_env)
