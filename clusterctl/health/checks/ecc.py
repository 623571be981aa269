"""Errors that the memory of a GPU corrects, and those that it cannot, before a run and during it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.check import node_check
from clusterctl.health.checks import gpus, ras, xid
from clusterctl.health.checks.recovery import HINTS
from clusterctl.health.model import Action, Outcome, Status, fail, warn
from clusterctl.health.symptom import Symptom
from clusterctl.health.vendors import AMD, JUDGED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.health.check import View

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
    by_vendor={AMD: ras.uncorrected},
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


def sign(gpu: int, more: int, recovery: int | None) -> Symptom | None:
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


CHECKS = (ecc_mode, ecc_uncorrected, ecc_corrected, sram_ecc)
