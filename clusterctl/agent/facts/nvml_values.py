"""Which values are asked of a GPU, and by which calls of NVIDIA's library.

Calls, field numbers and structures are those of NVIDIA's `nvml.h`.
"""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    Calls = dict[str, Callable[[], Any]]

FIELD_RECOVERY_ACTION = 230
FIELD_MEMORY_TEMP = 82
_RETIRED_SBE, _RETIRED_DBE = 29, 30
_TLIMIT_SHUTDOWN, _TLIMIT_SLOWDOWN, _TLIMIT_MEM_MAX, _TLIMIT_GPU_MAX = 193, 194, 195, 196

SAMPLED_FIELDS = {FIELD_RECOVERY_ACTION: "recovery_action", FIELD_MEMORY_TEMP: "mem_temp"}
"""Values that are only fields, by number; each has a return code of its own."""
FIELDS = {
    **SAMPLED_FIELDS,
    _RETIRED_SBE: "retired_sbe",
    _RETIRED_DBE: "retired_dbe",
    _TLIMIT_SHUTDOWN: "tlimit_shutdown",
    _TLIMIT_SLOWDOWN: "tlimit_slowdown",
    _TLIMIT_MEM_MAX: "tlimit_mem_max",
    _TLIMIT_GPU_MAX: "tlimit_gpu_max",
}
_SIGNED = frozenset({_TLIMIT_SHUTDOWN, _TLIMIT_SLOWDOWN, _TLIMIT_MEM_MAX, _TLIMIT_GPU_MAX})


def field(number: int, answer: Any) -> int:
    """Return the value of one answer of `nvmlDeviceGetFieldValues`."""
    return int(answer.value.siVal if number in _SIGNED else answer.value.uiVal)


def sampled(n: Any, handle: Any) -> Calls:
    """Return the calls for the few values that a running job is watched by; `n` is the bindings' module."""
    return {
        "uuid": lambda: text(n.nvmlDeviceGetUUID(handle)),
        "util": lambda: n.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory": lambda: memory(n, handle),
        "temp": lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
        "power_w": lambda: n.nvmlDeviceGetPowerUsage(handle) / 1000,
        "sm_clock": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM),
        "throttle": lambda: _reasons(n, handle),
        "ecc_unc": lambda: n.nvmlDeviceGetTotalEccErrors(
            handle, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
        ),
        "remapped": lambda: list(n.nvmlDeviceGetRemappedRows(handle)),
    }


def all_values(n: Any, handle: Any) -> Calls:
    """Return the calls for everything that is judged before a run."""
    return {
        **sampled(n, handle),
        **_name_plate(n, handle),
        **_memory_errors(n, handle),
        "temp_slowdown": lambda: n.nvmlDeviceGetTemperatureThreshold(handle, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        "temp_max": lambda: n.nvmlDeviceGetTemperatureThreshold(handle, n.NVML_TEMPERATURE_THRESHOLD_GPU_MAX),
        "mem_temp_max": lambda: n.nvmlDeviceGetTemperatureThreshold(handle, n.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
        "margin": lambda: n.nvmlDeviceGetMarginTemperature(handle),
        "power_limit_w": lambda: n.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "power_default_w": lambda: n.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000,
        "pstate": lambda: n.nvmlDeviceGetPerformanceState(handle),
        "sm_clock_max": lambda: n.nvmlDeviceGetMaxClockInfo(handle, n.NVML_CLOCK_SM),
        "pcie_width": lambda: n.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "pcie_width_max": lambda: n.nvmlDeviceGetMaxPcieLinkWidth(handle),
        "pcie_gen": lambda: n.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "pcie_gen_max": lambda: n.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "fabric": lambda: _fabric(n, handle),
        "persistence": lambda: n.nvmlDeviceGetPersistenceMode(handle),
        "mig": lambda: list(n.nvmlDeviceGetMigMode(handle)),
        "compute_mode": lambda: n.nvmlDeviceGetComputeMode(handle),
    }


def _name_plate(n: Any, handle: Any) -> Calls:
    return {
        "serial": lambda: text(n.nvmlDeviceGetSerial(handle)),
        "name": lambda: text(n.nvmlDeviceGetName(handle)),
        "pci": lambda: text(n.nvmlDeviceGetPciInfo(handle).busId).lower(),
        "subsystem": lambda: f"{n.nvmlDeviceGetPciInfo(handle).pciSubSystemId:08x}",
        "vbios": lambda: text(n.nvmlDeviceGetVbiosVersion(handle)),
        "minor": lambda: n.nvmlDeviceGetMinorNumber(handle),
        "capability": lambda: list(n.nvmlDeviceGetCudaComputeCapability(handle)),
    }


def _memory_errors(n: Any, handle: Any) -> Calls:
    return {
        "ecc_mode": lambda: list(n.nvmlDeviceGetEccMode(handle)),
        "ecc_default": lambda: n.nvmlDeviceGetDefaultEccMode(handle)[0],
        "ecc_cor": lambda: n.nvmlDeviceGetTotalEccErrors(
            handle, n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_VOLATILE_ECC
        ),
        "ecc_unc_aggregate": lambda: n.nvmlDeviceGetTotalEccErrors(
            handle, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_AGGREGATE_ECC
        ),
        "sram": lambda: _sram(n, handle),
        "rows": lambda: _rows(n, handle),
        "retired_pending": lambda: n.nvmlDeviceGetRetiredPagesPendingStatus(handle),
        "inforom": lambda: n.nvmlDeviceValidateInforom(handle) is None,
        "repair": lambda: list(n.nvmlDeviceGetRepairStatus(handle)),
    }


def memory(n: Any, handle: Any) -> dict[str, Any]:
    """Return used and total bytes. Version 2 leaves out what the driver reserves; version 1 counts it as used."""
    try:
        info, version = n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2), 2
    except (n.NVMLError_FunctionNotFound, n.NVMLError_NotSupported):
        info, version = n.nvmlDeviceGetMemoryInfo(handle), 1
    return {"used": info.used, "total": info.total, "version": version}


def _reasons(n: Any, handle: Any) -> int:
    try:
        return int(n.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except n.NVMLError_FunctionNotFound:
        return int(n.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _sram(n: Any, handle: Any) -> dict[str, int]:
    status = n.c_nvmlEccSramErrorStatus_v1_t()
    n.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    unc = status.aggregateUncParity + status.aggregateUncSecDed
    return {"unc": unc, "threshold": status.bThresholdExceeded}


def _rows(n: Any, handle: Any) -> dict[str, int]:
    """Return how many banks of memory have how many spare rows left."""
    banks = n.nvmlDeviceGetRowRemapperHistogram(handle)
    return {name: getattr(banks, name) for name in ("max", "high", "partial", "low", "none")}


def _fabric(n: Any, handle: Any) -> dict[str, Any]:
    try:
        return _fabric_info(n, handle, n.c_nvmlGpuFabricInfo_v3_t())
    except n.NVMLError as error:
        if error.value not in (n.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, n.NVML_ERROR_INVALID_ARGUMENT):
            raise
    return _fabric_info(n, handle, n.c_nvmlGpuFabricInfo_v2_t())


def _fabric_info(n: Any, handle: Any, info: Any) -> dict[str, Any]:
    n.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    cluster = bytes(info.clusterUuid).hex()
    return {
        "state": info.state,
        "status": info.status,
        "health": getattr(info, "healthSummary", 0),
        # Zeros are how the driver says that the fabric ends with this machine.
        "cluster": cluster if cluster.strip("0") else None,
        "clique": info.cliqueId,
    }


def text(value: Any) -> Any:
    """Return text that the bindings may give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
