"""Errors of a GPU's memory: ECC counters, rows remapped, repairs that wait for a reset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health import gpus
from clusterctl.health.check import View, node_check
from clusterctl.health.model import Action, Outcome, failed, warned

if TYPE_CHECKING:
    from collections.abc import Iterable

_FAMILY = "GPU memory"
_RESET = "Stop all jobs on the node, then `sudo nvidia-smi -r -i N`, or reboot where there is an NVSwitch"
_REPLACE = "Have the GPU replaced; run `nvidia-bug-report.sh` and give its serial number"


@node_check(
    name="gpu.ecc_mode",
    family=_FAMILY,
    source="NVML nvmlDeviceGetEccMode",
    threshold="on, and no change waiting for a reboot",
    severity="WARN",
    remedy="Turn ECC on (`sudo nvidia-smi -e 1`) and reboot",
    action=Action.FIX_CONFIG,
    gpu=True,
)
def ecc_mode(view: View) -> Iterable[Outcome]:
    """Error correction of GPU memory is on."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        now, pending = value
        if now != pending:
            return warned(f"{gpus.label(device)}: ECC changes at the next reboot", gpu=device["index"], value=value)
        return None if now else warned(f"{gpus.label(device)}: ECC is off", gpu=device["index"], value=value)

    return gpus.each(view, "ecc_mode", judge, "ECC is on, {n} GPUs")


@node_check(
    name="gpu.ecc_uncorrected",
    family=_FAMILY,
    source="NVML nvmlDeviceGetTotalEccErrors (uncorrected, since the driver was loaded)",
    threshold="at most `fail` errors",
    severity="FAIL",
    remedy=_RESET,
    action=Action.RESET_GPU,
    gpu=True,
    thresholds={"fail": 0.0},
)
def ecc_uncorrected(view: View) -> Iterable[Outcome]:
    """No memory error was left uncorrected since the driver was loaded."""
    most = view.limit("fail")

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value <= most:
            return None
        return failed(
            f"{gpus.label(device)}: {value} uncorrected memory errors", gpu=device["index"], value=value, expected=most
        )

    return gpus.each(view, "ecc_unc", judge, "no uncorrected memory errors on {n} GPUs")


@node_check(
    name="gpu.ecc_corrected",
    family=_FAMILY,
    source="NVML nvmlDeviceGetTotalEccErrors (corrected, since the driver was loaded)",
    threshold="at most `warn` errors",
    severity="WARN",
    remedy="Watch this GPU: many corrected errors come before uncorrected ones",
    gpu=True,
    thresholds={"warn": 20_000_000.0},
)
def ecc_corrected(view: View) -> Iterable[Outcome]:
    """The number of corrected memory errors is in the usual range."""
    most = view.limit("warn")

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value <= most:
            return None
        return warned(
            f"{gpus.label(device)}: {value} corrected memory errors", gpu=device["index"], value=value, expected=most
        )

    return gpus.each(view, "ecc_cor", judge, "few corrected memory errors on {n} GPUs")


@node_check(
    name="gpu.sram_ecc",
    family=_FAMILY,
    source="NVML nvmlDeviceGetSramEccErrorStatus",
    threshold="threshold flag not set; WARN above `warn` uncorrected errors over the GPU's life",
    severity="FAIL",
    remedy=_REPLACE,
    action=Action.RMA,
    gpu=True,
    thresholds={"warn": 4.0},
)
def sram_ecc(view: View) -> Iterable[Outcome]:
    """Errors of the on-chip memory stay under NVIDIA's limit for replacement."""
    most = view.limit("warn")

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value["threshold"]:
            return failed(f"{gpus.label(device)}: SRAM errors exceed NVIDIA's limit", gpu=device["index"], value=value)
        if value["unc"] > most:
            return warned(
                f"{gpus.label(device)}: {value['unc']} uncorrected SRAM errors", gpu=device["index"], value=value
            )
        return None

    return gpus.each(view, "sram", judge, "SRAM of {n} GPUs is within the limit")


@node_check(
    name="gpu.remap_pending",
    family=_FAMILY,
    source="NVML nvmlDeviceGetRemappedRows",
    threshold="none pending",
    severity="FAIL",
    remedy=_RESET,
    action=Action.RESET_GPU,
    gpu=True,
)
def remap_pending(view: View) -> Iterable[Outcome]:
    """No bad memory row waits for a reset to be replaced."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if not value[2]:
            return None
        return failed(
            f"{gpus.label(device)}: row remapping waits for a reset", gpu=device["index"], value=value[2], expected=0
        )

    return gpus.each(view, "remapped", judge, "no row remapping pending on {n} GPUs")


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
        known = f", serial {serial}" if serial else ""
        return failed(
            f"{gpus.label(device)}: row remapping failed{known}", gpu=device["index"], value=value[3], expected=0
        )

    return gpus.each(view, "remapped", judge, "no row remapping failed on {n} GPUs")


@node_check(
    name="gpu.remap_total",
    family=_FAMILY,
    source="NVML nvmlDeviceGetRemappedRows",
    threshold="at most `warn` rows remapped for uncorrected errors",
    severity="WARN",
    remedy="Plan a replacement: the spare rows are running out",
    action=Action.RMA,
    gpu=True,
    thresholds={"warn": 512.0},
)
def remap_total(view: View) -> Iterable[Outcome]:
    """Spare memory rows are not running out."""
    most = view.limit("warn")

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value[1] <= most:
            return None
        return warned(
            f"{gpus.label(device)}: {value[1]} rows remapped", gpu=device["index"], value=value[1], expected=most
        )

    return gpus.each(view, "remapped", judge, "few rows remapped on {n} GPUs")


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
        return warned(f"{gpus.label(device)}: a repair waits for a reboot", gpu=device["index"], value=value)

    return gpus.each(view, "repair", judge, "no repair pending on {n} GPUs")


@node_check(
    name="gpu.retired_pages",
    family=_FAMILY,
    source="NVML nvmlDeviceGetRetiredPagesPendingStatus (before Ampere)",
    threshold="none pending",
    severity="FAIL",
    remedy=_RESET,
    action=Action.RESET_GPU,
    gpu=True,
)
def retired_pages(view: View) -> Iterable[Outcome]:
    """No bad memory page of an older GPU waits for a reset to be retired."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        return (
            failed(f"{gpus.label(device)}: page retirement waits for a reset", gpu=device["index"], value=value)
            if value
            else None
        )

    return gpus.each(view, "retired_pending", judge, "no page retirement pending on {n} GPUs")


CHECKS = (
    ecc_mode,
    ecc_uncorrected,
    ecc_corrected,
    sram_ecc,
    remap_pending,
    remap_failure,
    remap_total,
    repair_pending,
    retired_pages,
)
