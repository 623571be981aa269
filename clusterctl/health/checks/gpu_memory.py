"""Checks of GPU memory: ECC errors, remapped rows, retired pages."""

from __future__ import annotations

from clusterctl.health.check import CheckedNode, node_check, remedy
from clusterctl.health.checks import amd, gpu_facts, xid
from clusterctl.health.checks.gpu_failures import HINTS
from clusterctl.health.findings import AMD, JUDGED, Action, Outcome, Status, Symptom

_FAMILY = "GPU memory"
CONTAINED_AT_MOST = 3.0
"""Maximum number of contained uncorrected errors of a healthy GPU; equal to the limit for XIDs 94 in a day."""
_REPLACE = "Have the GPU replaced; run `nvidia-bug-report.sh` and give its serial number"


@remedy(Action.FIX_CONFIG, "Turn ECC on (`sudo nvidia-smi -e 1`) and reboot")
@gpu_facts.gpu_check("gpu.ecc_mode", _FAMILY, "ecc_mode", "default ECC mode on {n} GPUs", severity="WARN")
def check_ecc_mode(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """Error correction of GPU memory is on if it is on by default for this board.

    Source: NVML nvmlDeviceGetEccMode, nvmlDeviceGetDefaultEccMode
    Healthy: on, or off if this is the default of the board (GeForce, RTX); no change waits for a reboot
    """
    now, pending = gpu.value
    if now != pending:
        return gpu.warn("ECC changes at the next reboot")
    # If a board does not report its default, the default may be off.
    return gpu.warn("ECC is off") if not now and gpu.get("ecc_default") else None


@remedy(Action.RESET_GPU, HINTS[Action.RESET_GPU])
@gpu_facts.gpu_check(
    "gpu.ecc_uncorrected",
    _FAMILY,
    "ecc_unc",
    "no uncorrected memory errors on {n} GPUs",
    vendors=JUDGED,
    judges_by_vendor={AMD: amd.judge_uncorrected_errors},
    thresholds={"fail": CONTAINED_AT_MOST},
)
def check_uncorrected_errors(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """There were no uncorrected memory errors since the driver was loaded.

    Source: NVML nvmlDeviceGetTotalEccErrors (uncorrected, since the driver was loaded), recovery action; of AMD the
        counts of every block in `ras/`; kernel log
    Healthy: none. WARN if all errors were contained: only the program with the error died (XID 94). FAIL above `fail`
        errors, if the driver recommends a recovery action, or if the kernel log has XID 48, 95 or 140 of that GPU. Any
        error of an AMD GPU is FAIL, and WARN once the GPU was reset: AMD's counts stay until the next boot
    """
    if gpu.value <= 0:
        return None
    message = f"{gpu.value} uncorrected memory errors"
    uncontained = gpu.index in xid.find_gpus_with_xids(gpu.node, _UNCONTAINED)
    if gpu.value > gpu.limit("fail") or gpu.get("recovery_action") or uncontained:
        return gpu.fail(message, expected=0)
    return gpu.warn(f"{message}, contained", expected=0, action=Action.NONE, hint=_CONTAINED_HINT)


_UNCONTAINED = frozenset({48, 95, 140})
_CONTAINED_HINT = "Only the program with the error died; a reset, when convenient, replaces the bad memory"


@remedy(Action.NONE, "Watch this GPU: many corrected errors often precede uncorrected ones")
@gpu_facts.gpu_check(
    "gpu.ecc_corrected",
    _FAMILY,
    "ecc_cor",
    "few corrected memory errors on {n} GPUs",
    severity="WARN",
    vendors=JUDGED,
    thresholds={"warn": 20_000_000.0},
)
def check_corrected_errors(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """The number of corrected memory errors is in the usual range.

    Source: corrected errors since the driver was loaded: NVML nvmlDeviceGetTotalEccErrors, `ras/` of AMD
    Healthy: at most `warn` errors
    """
    most = gpu.limit("warn")
    return gpu.warn(f"{gpu.value} corrected memory errors", expected=most) if gpu.value > most else None


@remedy(Action.RMA, _REPLACE)
@gpu_facts.gpu_check(
    "gpu.sram_ecc",
    _FAMILY,
    "sram",
    "SRAM of {n} GPUs is within the limit",
    without_root="the threshold flag stays unread",
    thresholds={"warn": 4.0},
)
def check_sram_errors(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """Errors of the on-chip memory stay under NVIDIA's limit for replacement.

    Source: NVML nvmlDeviceGetSramEccErrorStatus
    Healthy: the threshold flag is not set; WARN above `warn` uncorrected errors over the lifetime of the GPU
    """
    if gpu.value["threshold"]:
        return gpu.fail("SRAM errors exceed NVIDIA's limit")
    count = gpu.value["unc"]
    return gpu.warn(f"{count} uncorrected SRAM errors") if count > gpu.limit("warn") else None


def find_ecc_symptom(gpu: int, new_errors: int, recovery_action: int | None) -> Symptom | None:
    """Return the symptom of a GPU with `new_errors` uncorrected errors since the start of the run, or `None`."""
    if new_errors <= 0:
        return None
    check, words, detail = "gpu.ecc_uncorrected", "uncorrected memory errors", f"{new_errors} since the start"
    if new_errors > CONTAINED_AT_MOST or recovery_action:
        return Symptom(check, Status.FAIL, words, Action.RESET_GPU, gpu=gpu, detail=detail)
    return Symptom(check, Status.WARN, f"{words}, contained", Action.NONE, gpu=gpu, detail=detail)


# --- Replacement of bad memory: remapped rows, retired pages, pending repairs


@remedy(Action.RESET_GPU, HINTS[Action.RESET_GPU])
@gpu_facts.gpu_check("gpu.remap_pending", _FAMILY, "remapped", "no row remapping pending on {n} GPUs")
def check_pending_row_remapping(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """No bad memory row waits for a reset to be replaced.

    Source: NVML nvmlDeviceGetRemappedRows, recovery action
    Healthy: none pending; FAIL only if the driver recommends a recovery action too. NVIDIA's guide to memory errors
        allows work until a convenient reset. To fail as DCGM does: `severity: {gpu.remap_pending: fail}`
    """
    if not gpu.value[2]:
        return None
    say = gpu.fail if gpu.get("recovery_action") else gpu.warn
    return say("row remapping waits for a reset", value=gpu.value[2], expected=0)


@remedy(Action.RMA, _REPLACE)
@gpu_facts.gpu_check("gpu.remap_failure", _FAMILY, "remapped", "no row remapping failed on {n} GPUs")
def check_failed_row_remapping(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """All bad memory rows were replaced by spare rows.

    Source: NVML nvmlDeviceGetRemappedRows
    Healthy: no failure
    """
    if not gpu.value[3]:
        return None
    serial = gpu.get("serial")
    of_serial = f", serial {serial}" if serial else ""
    return gpu.fail(f"row remapping failed{of_serial}", value=gpu.value[3], expected=0)


@remedy(Action.RMA, "Plan the replacement of the GPU: the next bad row of a bank without spare rows cannot be replaced")
@gpu_facts.gpu_check("gpu.remap_total", _FAMILY, "rows", "spare rows in all banks of {n} GPUs", severity="WARN")
def check_spare_rows(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """Spare memory rows are not running out.

    Source: NVML nvmlDeviceGetRowRemapperHistogram: number of memory banks by remaining spare rows
    Healthy: no bank with few or no spare rows
    """
    without, few, total = gpu.value["none"], gpu.value["low"], sum(gpu.value.values())
    if not few and not without:
        return None
    return gpu.warn(f"{without} banks without a spare row, {few} with few, of {total}")


@remedy(Action.REBOOT_NODE, "Reboot the node: the repair runs at the reboot")
@gpu_facts.gpu_check("gpu.repair_pending", _FAMILY, "repair", "no repair pending on {n} GPUs", severity="WARN")
def check_pending_repairs(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """No repair waits for a reboot.

    Source: NVML nvmlDeviceGetRepairStatus
    Healthy: no channel or TPC repair pending
    """
    return gpu.warn("a repair waits for a reboot") if any(gpu.value) else None


@remedy(Action.RESET_GPU, HINTS[Action.RESET_GPU])
@node_check("gpu.retired_pages", _FAMILY, gpu=True, thresholds={"warn": 15.0, "fail": 60.0})
def check_retired_pages(node: CheckedNode) -> Outcome | list[Outcome]:
    """No bad memory page of an older GPU waits for a reset, and more pages can be retired.

    Source: NVML fields 29 and 30, nvmlDeviceGetRetiredPagesPendingStatus (before Ampere)
    Healthy: none pending, because these cards use a bad page until a reset. WARN above `warn` pages retired for one
        reason, FAIL from `fail` retired pages in total. A GPU can retire 64 pages, and NVIDIA replaces it at 60
    """
    waiting = gpu_facts.judge_each_gpu(
        node, "retired_pending", _judge_retirement, "no page retirement pending on {n} GPUs"
    )
    retired = gpu_facts.judge_each_gpu(node, "retired", _judge_retired_pages, "few memory pages retired on {n} GPUs")
    both = [*waiting, *retired]
    adverse = [outcome for outcome in both if outcome.status not in (Status.PASS, Status.SKIP)]
    # The check judges two values: if both are healthy, one outcome is enough.
    return adverse or next((outcome for outcome in both if outcome.status is Status.PASS), both[0])


def _judge_retirement(gpu: gpu_facts.GpuValue) -> Outcome | None:
    return gpu.fail("page retirement waits for a reset") if gpu.value else None


def _judge_retired_pages(gpu: gpu_facts.GpuValue) -> Outcome | None:
    total, too_many = sum(gpu.value), sum(gpu.value) >= gpu.limit("fail")
    if not too_many and max(gpu.value) <= gpu.limit("warn"):
        return None
    say = gpu.fail if too_many else gpu.warn
    return say(f"{total} memory pages retired", action=Action.RMA, hint=_REPLACE)


def find_row_remap_symptom(gpu: int, failed: int | None) -> Symptom | None:
    """Return the symptom of a GPU whose row remapping failed, or `None`. A pending remapping is no symptom."""
    return Symptom("gpu.remap_failure", Status.FAIL, "row remapping failed", Action.RMA, gpu=gpu) if failed else None
