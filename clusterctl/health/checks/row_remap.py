"""Memory of a GPU that was found bad: rows remapped, pages retired, repairs that wait, before a run and during it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.check import node_check
from clusterctl.health.checks import gpus
from clusterctl.health.checks.recovery import HINTS
from clusterctl.health.model import Action, Outcome, Status, fail, warn
from clusterctl.health.symptom import Symptom

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.health.check import View

_FAMILY = "GPU memory"
_REPLACE = "Have the GPU replaced; run `nvidia-bug-report.sh` and give its serial number"


@node_check(
    name="gpu.remap_pending",
    family=_FAMILY,
    source="NVML nvmlDeviceGetRemappedRows, recovery action",
    threshold=(
        "none pending; FAIL only where the driver asks for an action too: NVIDIA's guide to memory errors lets running "
        "and new work go on until a convenient reset (DCGM fails it: `severity: {gpu.remap_pending: fail}`)"
    ),
    severity="FAIL",
    remedy=HINTS[Action.RESET_GPU],
    action=Action.RESET_GPU,
    gpu=True,
)
def remap_pending(view: View) -> Iterable[Outcome]:
    """No bad memory row waits for a reset to be replaced."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if not value[2]:
            return None
        say = fail if gpus.value(device, "recovery_action") else warn
        message = f"{gpus.label(device)}: row remapping waits for a reset"
        return say(message, gpu=device["index"], value=value[2], expected=0)

    return gpus.judge_each(view, "remapped", judge, "no row remapping pending on {n} GPUs")


@node_check(
    name="gpu.remap_failure",
    family=_FAMILY,
    source="NVML nvmlDeviceGetRemappedRows",
    threshold="no failure",
    severity="FAIL",
    remedy=_REPLACE,
    action=Action.RMA,
    gpu=True,
)
def remap_failure(view: View) -> Iterable[Outcome]:
    """Bad memory rows could be replaced by spare ones."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if not value[3]:
            return None
        serial = device.get("v", {}).get("serial")
        of_serial = f", serial {serial}" if serial else ""
        return fail(
            f"{gpus.label(device)}: row remapping failed{of_serial}", gpu=device["index"], value=value[3], expected=0
        )

    return gpus.judge_each(view, "remapped", judge, "no row remapping failed on {n} GPUs")


@node_check(
    name="gpu.remap_total",
    family=_FAMILY,
    source="NVML nvmlDeviceGetRowRemapperHistogram: banks of memory by the spare rows that they have left",
    threshold="no bank with few or no spare rows left",
    severity="WARN",
    remedy="Plan a replacement: the next bad row of such a bank cannot be replaced",
    action=Action.RMA,
    gpu=True,
)
def remap_total(view: View) -> Iterable[Outcome]:
    """Spare memory rows are not running out."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if not value["low"] and not value["none"]:
            return None
        left = f"{value['none']} banks without a spare row, {value['low']} with few, of {sum(value.values())}"
        return warn(f"{gpus.label(device)}: {left}", gpu=device["index"], value=value)

    return gpus.judge_each(view, "rows", judge, "spare rows in all banks of {n} GPUs")


@node_check(
    name="gpu.repair_pending",
    family=_FAMILY,
    source="NVML nvmlDeviceGetRepairStatus",
    threshold="no channel or TPC repair pending",
    severity="WARN",
    remedy="Reboot the node so that the repair takes place",
    action=Action.REBOOT_NODE,
    gpu=True,
)
def repair_pending(view: View) -> Iterable[Outcome]:
    """No repair waits for a reboot."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if not any(value):
            return None
        return warn(f"{gpus.label(device)}: a repair waits for a reboot", gpu=device["index"], value=value)

    return gpus.judge_each(view, "repair", judge, "no repair pending on {n} GPUs")


@node_check(
    name="gpu.retired_pages",
    family=_FAMILY,
    source="NVML fields 29 and 30, nvmlDeviceGetRetiredPagesPendingStatus (before Ampere)",
    threshold=(
        "none pending (these cards go on using a bad page until a reset); WARN above `warn` retired for one reason, "
        "FAIL from `fail` on in all (NVIDIA's guide to page retirement replaces at 60; 64 fit)"
    ),
    severity="FAIL",
    remedy=HINTS[Action.RESET_GPU],
    action=Action.RESET_GPU,
    gpu=True,
    thresholds={"warn": 15.0, "fail": 60.0},
)
def retired_pages(view: View) -> Iterable[Outcome]:
    """No bad memory page of an older GPU waits for a reset, and there is room to retire more."""

    def pending(device: gpus.Device, value: Any) -> Outcome | None:
        if not value:
            return None
        return fail(f"{gpus.label(device)}: page retirement waits for a reset", gpu=device["index"], value=value)

    def total(device: gpus.Device, value: Any) -> Outcome | None:
        if sum(value) < view.limit("fail") and max(value) <= view.limit("warn"):
            return None
        say = fail if sum(value) >= view.limit("fail") else warn
        message = f"{gpus.label(device)}: {sum(value)} memory pages retired"
        return say(message, gpu=device["index"], value=value, action=Action.RMA, hint=_REPLACE)

    waiting = gpus.judge_each(view, "retired_pending", pending, "no page retirement pending on {n} GPUs")
    retired = gpus.judge_each(view, "retired", total, "few memory pages retired on {n} GPUs")
    both = [*waiting, *retired]
    adverse = [outcome for outcome in both if outcome.status not in (Status.PASS, Status.SKIP)]
    # Two values, one check: where neither is bad, one sentence is enough.
    return adverse or [next((outcome for outcome in both if outcome.status is Status.PASS), both[0])]


def sign(gpu: int, failure: int | None) -> Symptom | None:
    """Return what a sample's row remapping says of a GPU in a run. One that is pending waits for the end of the run."""
    if not failure:
        return None
    return Symptom(
        gpu=gpu,
        check="gpu.remap_failure",
        status=Status.FAIL,
        words="row remapping failed",
        action=Action.RMA,
    )


CHECKS = (remap_pending, remap_failure, remap_total, repair_pending, retired_pages)
