"""Memory of NVIDIA GPUs: ECC errors and remapped rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clusterctl.health.check import View, node_check
from clusterctl.health.checks import amd, gpus, xid
from clusterctl.health.checks.device_errors import HINTS
from clusterctl.health.model import AMD, JUDGED, Action, Outcome, Status, Symptom, fail, warn

_FAMILY = "GPU memory"
CONTAINED_AT_MOST = 3.0
"""Uncorrected errors that a GPU may have had without being suspect, each contained: as many as XIDs 94 in a day."""
_REPLACE = "Have the GPU replaced; run `nvidia-bug-report.sh` and give its serial number"


@node_check(
    name="gpu.ecc_mode",
    family=_FAMILY,
    source="NVML nvmlDeviceGetEccMode, nvmlDeviceGetDefaultEccMode",
    threshold="on, or off where the board is sold so (GeForce, RTX), and no change waiting for a reboot",
    severity="WARN",
    remedy="Turn ECC on (`sudo nvidia-smi -e 1`) and reboot",
    action=Action.FIX_CONFIG,
    gpu=True,
)
def ecc_mode(view: View) -> Iterable[Outcome]:
    """Error correction of GPU memory is on, where the board has it on by default."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        now, pending = value
        if now != pending:
            return warn(f"{gpus.label(device)}: ECC changes at the next reboot", gpu=device["index"], value=value)
        # A board that does not tell its default may be one that has ECC off.
        if now or not gpus.value(device, "ecc_default"):
            return None
        return warn(f"{gpus.label(device)}: ECC is off", gpu=device["index"], value=value)

    return gpus.judge_each(view, "ecc_mode", judge, "ECC as by default on {n} GPUs")


@node_check(
    name="gpu.ecc_uncorrected",
    family=_FAMILY,
    source=(
        "NVML nvmlDeviceGetTotalEccErrors (uncorrected, since the driver was loaded), recovery action; of AMD the "
        "counts of every block in `ras/`; kernel log"
    ),
    threshold=(
        "none; WARN where they were contained; FAIL above `fail`, or where the driver asks for an action, or where the "
        "kernel log has XID 48, 95 or 140 of that GPU (NVIDIA's catalogue: 94 is contained, only its program died). "
        "Any of an AMD GPU FAIL, and WARN once the GPU was reset: its counts stay until the next boot"
    ),
    severity="FAIL",
    remedy=HINTS[Action.RESET_GPU],
    action=Action.RESET_GPU,
    gpu=True,
    vendors=JUDGED,
    by_vendor={AMD: amd.uncorrected},
    thresholds={"fail": CONTAINED_AT_MOST},
)
def ecc_uncorrected(view: View) -> Iterable[Outcome]:
    """No memory error was left uncorrected since the driver was loaded."""
    most = view.limit("fail")
    spread = xid.gpus_with(view, _UNCONTAINED)

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value <= 0:
            return None
        index, message = device["index"], f"{gpus.label(device)}: {value} uncorrected memory errors"
        if value > most or gpus.value(device, "recovery_action") or index in spread:
            return fail(message, gpu=index, value=value, expected=0)
        return warn(f"{message}, contained", gpu=index, value=value, expected=0, action=Action.NONE, hint=_CONTAINED)

    return gpus.judge_each(view, "ecc_unc", judge, "no uncorrected memory errors on {n} GPUs")


_UNCONTAINED = frozenset({48, 95, 140})
_CONTAINED = "The program that met it died, nothing else; a reset at the next occasion replaces the bad memory"


@node_check(
    name="gpu.ecc_corrected",
    family=_FAMILY,
    source="corrected errors since the driver was loaded: NVML nvmlDeviceGetTotalEccErrors, `ras/` of AMD",
    threshold="at most `warn` errors",
    severity="WARN",
    remedy="Watch this GPU: many corrected errors come before uncorrected ones",
    gpu=True,
    vendors=JUDGED,
    thresholds={"warn": 20_000_000.0},
)
def ecc_corrected(view: View) -> Iterable[Outcome]:
    """The number of corrected memory errors is in the usual range."""
    most = view.limit("warn")

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value <= most:
            return None
        return warn(
            f"{gpus.label(device)}: {value} corrected memory errors", gpu=device["index"], value=value, expected=most
        )

    return gpus.judge_each(view, "ecc_cor", judge, "few corrected memory errors on {n} GPUs")


@node_check(
    name="gpu.sram_ecc",
    family=_FAMILY,
    source="NVML nvmlDeviceGetSramEccErrorStatus",
    threshold="threshold flag not set; WARN above `warn` uncorrected errors over the GPU's life",
    severity="FAIL",
    remedy=_REPLACE,
    action=Action.RMA,
    gpu=True,
    root="the threshold flag stays unread",
    thresholds={"warn": 4.0},
)
def sram_ecc(view: View) -> Iterable[Outcome]:
    """Errors of the on-chip memory stay under NVIDIA's limit for replacement."""
    most = view.limit("warn")

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value["threshold"]:
            return fail(f"{gpus.label(device)}: SRAM errors exceed NVIDIA's limit", gpu=device["index"], value=value)
        if value["unc"] > most:
            return warn(
                f"{gpus.label(device)}: {value['unc']} uncorrected SRAM errors", gpu=device["index"], value=value
            )
        return None

    return gpus.judge_each(view, "sram", judge, "SRAM of {n} GPUs is within the limit")


def find_ecc_symptom(gpu: int, more: int, recovery: int | None) -> Symptom | None:
    """Return what uncorrected errors say of a GPU in a run: so many since its start, and the recovery action.

    Those that were not contained are told by their XIDs too.
    """
    if more <= 0:
        return None
    spread = more > CONTAINED_AT_MOST or bool(recovery)
    return Symptom(
        gpu=gpu,
        check="gpu.ecc_uncorrected",
        status=Status.FAIL if spread else Status.WARN,
        words="uncorrected memory errors" if spread else "uncorrected memory errors, contained",
        action=Action.RESET_GPU if spread else Action.NONE,
        detail=f"{more} since the start",
    )


# --- Memory of a GPU that was found bad: rows remapped, pages retired, repairs that wait, before a run and during it.


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


def find_row_remap_symptom(gpu: int, failure: int | None) -> Symptom | None:
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
