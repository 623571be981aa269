"""Modes that an administrator sets on a GPU, and variables that change how CUDA works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.check import View, node_check
from clusterctl.health.checks import gpus
from clusterctl.health.model import Action, Outcome, fail, ok, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FAMILY = "GPU modes"
_PROHIBITED = 2
_EXCLUSIVE = 3


@node_check(
    name="gpu.mig_mode",
    family=_FAMILY,
    source="NVML nvmlDeviceGetMigMode",
    threshold="off, or on where `health.expect.mig` is true; no change pending",
    severity="FAIL",
    remedy="`sudo nvidia-smi -mig 0` (or 1) and reset the GPU",
    action=Action.FIX_CONFIG,
    gpu=True,
)
def mig_mode(view: View) -> Iterable[Outcome]:
    """GPUs are not split into instances, unless the cluster file says so."""
    wanted = int(bool(view.context.expect.get("mig", False)))

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        now, pending = value
        index = device["index"]
        if now != pending:
            return fail(
                f"{gpus.label(device)}: MIG mode changes at the next reset", gpu=index, value=value, expected=wanted
            )
        if now != wanted:
            return fail(f"{gpus.label(device)}: MIG is {'on' if now else 'off'}", gpu=index, value=now, expected=wanted)
        return None

    return gpus.judge_each(view, "mig", judge, "MIG as expected on {n} GPUs")


@node_check(
    name="gpu.compute_mode",
    family=_FAMILY,
    source="NVML nvmlDeviceGetComputeMode",
    threshold="default; exclusive WARN, prohibited FAIL",
    severity="FAIL",
    remedy="`sudo nvidia-smi -c 0`",
    action=Action.FIX_CONFIG,
    gpu=True,
)
def compute_mode(view: View) -> Iterable[Outcome]:
    """GPUs may be computed on."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value == _PROHIBITED:
            return fail(f"{gpus.label(device)}: compute mode prohibited", gpu=device["index"], value=value, expected=0)
        if value == _EXCLUSIVE:
            return warn(f"{gpus.label(device)}: compute mode exclusive", gpu=device["index"], value=value, expected=0)
        return None

    return gpus.judge_each(view, "compute_mode", judge, "compute mode of {n} GPUs is default")


@node_check(
    name="gpu.persistence",
    family=_FAMILY,
    source="NVML nvmlDeviceGetPersistenceMode",
    threshold="on",
    severity="WARN",
    remedy="`sudo nvidia-smi -pm 1` (or nvidia-persistenced): without it every start of CUDA costs seconds",
    action=Action.FIX_CONFIG,
    gpu=True,
)
def persistence(view: View) -> Iterable[Outcome]:
    """The driver stays loaded while nobody uses a GPU."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        return (
            None
            if value
            else warn(f"{gpus.label(device)}: persistence mode is off", gpu=device["index"], value=value, expected=1)
        )

    return gpus.judge_each(view, "persistence", judge, "persistence mode is on, {n} GPUs")


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
    names = sorted(name for name in _BAD_ENV if name in env)
    yield warn(f"{', '.join(names)} set", value=names) if names else ok("no debugging variable set")


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


CHECKS = (mig_mode, compute_mode, persistence, bad_env)
