"""Errors of AMD's GPUs: those that memory and engines could not correct, and pages of memory that are bad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.check import node_check
from clusterctl.health.checks import amd, amdgpu_log, gpus
from clusterctl.health.model import Action, Outcome, Status, fail, warn
from clusterctl.health.symptom import Symptom
from clusterctl.health.vendors import AMD

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.health.check import View

_REPAIRED = (
    "Nothing to do: the GPU was reset since, which takes bad pages out of use; the count ends with the next boot"
)


def uncorrected(view: View) -> Iterable[Outcome]:
    """Judge errors that were left uncorrected since the driver was loaded; the driver counts on over a reset."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value <= 0:
            return None
        index, message = device["index"], f"{gpus.label(device)}: {value} uncorrected errors in {_blocks(device)}"
        if amdgpu_log.was_reset_since(view, device, "ras"):
            text = f"{message}, since reset"
            return warn(text, gpu=index, value=value, expected=0, action=Action.NONE, hint=_REPAIRED)
        hint = amd.reset_hint(view, device, Action.RESET_GPU)
        return fail(message, gpu=index, value=value, expected=0, action=Action.RESET_GPU, hint=hint)

    return gpus.judge_each(view, "ecc_unc", judge, "no uncorrected errors on {n} GPUs")


def _blocks(device: gpus.Device) -> str:
    blocks = gpus.value(device, "ras") or {}
    return ", ".join(name for name, (wrong, _) in blocks.items() if wrong) or "memory"


@node_check(
    name="gpu.bad_pages",
    family="GPU memory",
    source="`ras/gpu_vram_bad_pages` of AMD's driver",
    threshold=(
        "none that waits to be taken out of use, none that could not be; WARN above `warn` out of use (the driver "
        "itself says when there are too many: `gpu.driver_log`)"
    ),
    severity="FAIL",
    remedy="Reset the GPU, with all of its XGMI hive, or reboot",
    action=Action.RESET_GPU,
    gpu=True,
    vendors=(AMD,),
    thresholds={"warn": 256.0},
)
def bad_pages(view: View) -> Iterable[Outcome]:
    """No bad memory page of an AMD GPU is still in use, and few have been taken out of it."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        index, name = device["index"], gpus.label(device)
        in_use = value["pending"] + value["failed"]
        if in_use:
            hint = amd.reset_hint(view, device, Action.RESET_GPU)
            message = f"{name}: {in_use} bad memory pages are still in use"
            return fail(message, gpu=index, value=value, action=Action.RESET_GPU, hint=hint)
        if value["retired"] > view.limit("warn"):
            hint = amd.reset_hint(view, device, Action.RMA)
            message = f"{name}: {value['retired']} bad memory pages taken out of use"
            return warn(message, gpu=index, value=value, action=Action.RMA, hint=hint)
        return None

    return gpus.judge_each(view, "bad_pages", judge, "no bad memory page in use on {n} GPUs")


def sign(gpu: int, more: int) -> Symptom | None:
    """Return what uncorrected errors say of a GPU in a run: `more` since its start."""
    if more <= 0:
        return None
    return Symptom(
        gpu=gpu,
        check="gpu.ecc_uncorrected",
        status=Status.FAIL,
        words="uncorrected errors",
        action=Action.RESET_GPU,
        detail=f"{more} since the start",
    )


CHECKS = (bad_pages,)
