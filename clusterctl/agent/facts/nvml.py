"""What NVIDIA's management library says about every GPU; each call's error is kept beside the others' values.

Calls, field numbers and return codes are those of NVIDIA's `nvml.h`. AMD has a library of the same kind (`amdsmi`); a
module with the same `collect` and the same shape of devices is all that another vendor needs.
"""

from __future__ import annotations

import ctypes
import os
import time

from clusterctl.agent.facts import bindings, paths
from clusterctl.agent.facts.children import AbsentError
from clusterctl.agent.facts.procs import run_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

LIBRARY = "libnvidia-ml.so.1"
LIBRARY_NOT_FOUND = 12
HW_SLOWDOWN = 0x8 | 0x40 | 0x80
"""Clock event bits of a slowdown by hardware: any, thermal, power brake."""

FIELD_RECOVERY_ACTION = 230
FIELD_MEMORY_TEMP = 82
# Not the bindings' own constants: there "read" is a tuple, by a stray comma.
_P2P_READ, _P2P_NVLINK = 0, 2
_MOST_LINKS = 36
_BINDINGS_FAILED = 2
"""The code kept for a call that the bindings themselves could not make."""

_THROTTLE_SAMPLES = 3
_THROTTLE_PAUSE = 0.12
_GONE_PAUSE = 0.1


def collect(root: str, wanted: bool) -> dict[str, Any]:
    """Return the group `nvml`.

    Raises:
        AbsentError: No GPU is asked for, or there is neither library nor bindings.
    """
    if not wanted:
        raise AbsentError("no GPU is declared")
    if not _library_is_there():
        return {"init_error": LIBRARY_NOT_FOUND, "devices": []}
    session = Session()
    if session.init_error is not None:
        return {"init_error": session.init_error, "devices": []}
    return {**session.system(), "devices": session.devices(root), "p2p": session.p2p()}


def open_session() -> Session | str:
    """Return NVML, open; or, where there is none to open, why."""
    if not _library_is_there():
        return "there is no NVIDIA driver library"
    try:
        return Session()
    except AbsentError as error:
        return str(error)


def _library_is_there() -> bool:
    """Tell whether the driver's library loads: to know that, the costly bindings need not be loaded."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


class Session:
    """NVML kept open: handles are taken once, values at every call.

    Attributes:
        init_error: The code that opening ended with, or `None`.
    """

    def __init__(self) -> None:
        try:
            self._nvml = bindings.load()
        except bindings.NoBindingsError as error:
            raise AbsentError(str(error)) from error
        self.init_error: int | None = None
        self.init_ms = 0.0
        began = time.monotonic()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self.init_error = error.value
            return
        self.init_ms = round((time.monotonic() - began) * 1000, 1)
        self.count = self._try(self._nvml.nvmlDeviceGetCount)
        self.handles = [self._try(self._nvml.nvmlDeviceGetHandleByIndex, i) for i in range(self.count[0] or 0)]

    def system(self) -> dict[str, Any]:
        """Return versions, count and what opening took."""
        nvml = self._nvml
        return {
            "init_error": None,
            "init_ms": self.init_ms,
            "driver": _text(self._try(nvml.nvmlSystemGetDriverVersion)[0]),
            "nvml": _text(self._try(nvml.nvmlSystemGetNVMLVersion)[0]),
            "cuda": self._try(nvml.nvmlSystemGetCudaDriverVersion_v2)[0],
            "count": self.count[0],
            "count_error": self.count[1],
        }

    def devices(self, root: str = "/") -> list[dict[str, Any]]:
        """Return every GPU's values and errors."""
        found = []
        for index, (handle, error) in enumerate(self.handles):
            device: dict[str, Any] = {"index": index, "v": {}, "err": {}}
            if handle is None:
                device["err"]["handle"] = error
            else:
                self._read(device, self._calls(handle))
                self._throttle(device, handle)
                device["v"].update(self._fields(device, handle))
                self._links(device, handle)
                self._processes(device, handle, root)
            found.append(device)
        return found

    def sample(self) -> list[dict[str, Any]]:
        """Return the few values that a running job is watched by."""
        found = []
        for index, (handle, error) in enumerate(self.handles):
            device: dict[str, Any] = {"index": index, "v": {}, "err": {}}
            if handle is None:
                device["err"]["handle"] = error
            else:
                self._read(device, self._sampled(handle))
                device["v"].update(self._fields(device, handle))
            found.append(device)
        return found

    def holders(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return memory and processes of some GPUs; those that do not answer are left out: they hold nothing usable."""
        found = []
        for index in indices:
            handle = self.handles[index][0] if index < len(self.handles) else None
            memory = None if handle is None else self._try(self._memory, handle)[0]
            if handle is None or memory is None:
                continue
            device: dict[str, Any] = {"v": {}, "err": {}}
            self._processes(device, handle, "/")
            found.append({"gpu": index, **memory, "procs": device["v"].get("procs") or []})
        return found

    def p2p(self) -> list[list[int | None]]:
        """Return `[i, j, over NVLink, read]` for every pair; 0 is OK, `None` could not be asked."""
        pairs: list[list[int | None]] = []
        usable = [(i, handle) for i, (handle, _) in enumerate(self.handles) if handle is not None]
        status = self._nvml.nvmlDeviceGetP2PStatus
        for at, (i, one) in enumerate(usable):
            for j, other in usable[at + 1 :]:
                nvlink = self._try(status, one, other, _P2P_NVLINK)[0]
                pairs.append([i, j, nvlink, self._try(status, one, other, _P2P_READ)[0]])
        return pairs

    def _try(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, int | None]:
        try:
            return call(*arguments), None
        except self._nvml.NVMLError as error:
            return None, error.value
        except (ctypes.ArgumentError, AttributeError, TypeError):
            return None, _BINDINGS_FAILED

    def _read(self, device: dict[str, Any], calls: dict[str, Callable[[], Any]]) -> None:
        for name, call in calls.items():
            value, error = self._try(call)
            if error is None:
                device["v"][name] = value
            else:
                device["err"][name] = error

    def _sampled(self, handle: Any) -> dict[str, Callable[[], Any]]:
        n = self._nvml
        return {
            "uuid": lambda: _text(n.nvmlDeviceGetUUID(handle)),
            "util": lambda: n.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory": lambda: self._memory(handle),
            "temp": lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
            "power_w": lambda: n.nvmlDeviceGetPowerUsage(handle) / 1000,
            "sm_clock": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM),
            "throttle": lambda: self._reasons(handle),
            "ecc_unc": lambda: n.nvmlDeviceGetTotalEccErrors(
                handle, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
            ),
            "remapped": lambda: list(n.nvmlDeviceGetRemappedRows(handle)),
        }

    def _calls(self, handle: Any) -> dict[str, Callable[[], Any]]:
        n = self._nvml
        calls: dict[str, Callable[[], Any]] = {
            **self._sampled(handle),
            "serial": lambda: _text(n.nvmlDeviceGetSerial(handle)),
            "name": lambda: _text(n.nvmlDeviceGetName(handle)),
            "pci": lambda: _text(n.nvmlDeviceGetPciInfo(handle).busId).lower(),
            "vbios": lambda: _text(n.nvmlDeviceGetVbiosVersion(handle)),
            "minor": lambda: n.nvmlDeviceGetMinorNumber(handle),
            "ecc_mode": lambda: list(n.nvmlDeviceGetEccMode(handle)),
            "ecc_cor": lambda: n.nvmlDeviceGetTotalEccErrors(
                handle, n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_VOLATILE_ECC
            ),
            "ecc_unc_aggregate": lambda: n.nvmlDeviceGetTotalEccErrors(
                handle, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_AGGREGATE_ECC
            ),
            "sram": lambda: self._sram(handle),
            "retired_pending": lambda: n.nvmlDeviceGetRetiredPagesPendingStatus(handle),
            "inforom": lambda: n.nvmlDeviceValidateInforom(handle) is None,
            "repair": lambda: list(n.nvmlDeviceGetRepairStatus(handle)),
            "temp_slowdown": lambda: n.nvmlDeviceGetTemperatureThreshold(handle, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            "temp_max": lambda: n.nvmlDeviceGetTemperatureThreshold(handle, n.NVML_TEMPERATURE_THRESHOLD_GPU_MAX),
            "mem_temp_max": lambda: n.nvmlDeviceGetTemperatureThreshold(handle, n.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
            "power_limit_w": lambda: n.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
            "power_default_w": lambda: n.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000,
            "pstate": lambda: n.nvmlDeviceGetPerformanceState(handle),
            "sm_clock_max": lambda: n.nvmlDeviceGetMaxClockInfo(handle, n.NVML_CLOCK_SM),
            "pcie_width": lambda: n.nvmlDeviceGetCurrPcieLinkWidth(handle),
            "pcie_width_max": lambda: n.nvmlDeviceGetMaxPcieLinkWidth(handle),
            "pcie_gen": lambda: n.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            "pcie_gen_max": lambda: n.nvmlDeviceGetMaxPcieLinkGeneration(handle),
            "fabric": lambda: self._fabric(handle),
            "persistence": lambda: n.nvmlDeviceGetPersistenceMode(handle),
            "mig": lambda: list(n.nvmlDeviceGetMigMode(handle)),
            "compute_mode": lambda: n.nvmlDeviceGetComputeMode(handle),
        }
        return calls

    def _memory(self, handle: Any) -> dict[str, Any]:
        """Return used and total bytes. Version 2 leaves out what the driver reserves; version 1 counts it as used."""
        n = self._nvml
        try:
            found, version = n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2), 2
        except (n.NVMLError_FunctionNotFound, n.NVMLError_NotSupported):
            found, version = n.nvmlDeviceGetMemoryInfo(handle), 1
        return {"used": found.used, "total": found.total, "version": version}

    def _reasons(self, handle: Any) -> int:
        n = self._nvml
        try:
            return int(n.nvmlDeviceGetCurrentClocksEventReasons(handle))
        except n.NVMLError_FunctionNotFound:
            return int(n.nvmlDeviceGetCurrentClocksThrottleReasons(handle))

    def _throttle(self, device: dict[str, Any], handle: Any) -> None:
        """Look again, twice, where hardware slows the clock: once may be chance."""
        if "throttle" not in device["v"]:
            return
        samples = [device["v"]["throttle"]]
        while samples[0] & HW_SLOWDOWN and len(samples) < _THROTTLE_SAMPLES:
            time.sleep(_THROTTLE_PAUSE)
            again, error = self._try(self._reasons, handle)
            samples.append(0 if error is not None else again)
        device["v"]["throttle"] = samples

    def _sram(self, handle: Any) -> dict[str, int]:
        status = self._nvml.c_nvmlEccSramErrorStatus_v1_t()
        self._nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
        unc = status.aggregateUncParity + status.aggregateUncSecDed
        return {"unc": unc, "threshold": status.bThresholdExceeded}

    def _fabric(self, handle: Any) -> dict[str, int]:
        n = self._nvml
        info = n.c_nvmlGpuFabricInfo_v3_t()
        try:
            n.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
            return {"state": info.state, "status": info.status, "health": info.healthSummary}
        except n.NVMLError as error:
            if error.value not in (n.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, n.NVML_ERROR_INVALID_ARGUMENT):
                raise
        older = n.c_nvmlGpuFabricInfo_v2_t()
        n.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(older))
        return {"state": older.state, "status": older.status, "health": 0}

    def _fields(self, device: dict[str, Any], handle: Any) -> dict[str, Any]:
        """Return values that are only fields; each has a return code of its own."""
        wanted = {FIELD_RECOVERY_ACTION: "recovery_action", FIELD_MEMORY_TEMP: "mem_temp"}
        answers, error = self._try(self._nvml.nvmlDeviceGetFieldValues, handle, list(wanted))
        if error is not None:
            device["err"].update(dict.fromkeys(wanted.values(), error))
            return {}
        found = {}
        for answer in answers:
            name = wanted[answer.fieldId]
            if answer.nvmlReturn == 0:
                found[name] = answer.value.uiVal
            else:
                device["err"][name] = answer.nvmlReturn
        return found

    def _links(self, device: dict[str, Any], handle: Any) -> None:
        states: list[int] = []
        error = None
        for link in range(_MOST_LINKS):
            state, error = self._try(self._nvml.nvmlDeviceGetNvLinkState, handle, link)
            if error is not None:
                break
            states.append(state)
        if states:
            device["v"]["nvlinks"] = states
        elif error is not None:
            device["err"]["nvlinks"] = error

    def _processes(self, device: dict[str, Any], handle: Any, root: str) -> None:
        """List who holds the GPU. Whoever we cannot see and is not listed again was just ending."""
        found = self._listed(device, handle)
        named = [{**entry, **_identity(root, entry["pid"])} for entry in found.values()]
        if not all(entry["visible"] for entry in named):
            time.sleep(_GONE_PAUSE)
            again = self._listed(device, handle)
            named = [entry for entry in named if entry["visible"] or entry["pid"] in again]
        if "procs" not in device["err"]:
            device["v"]["procs"] = named

    def _listed(self, device: dict[str, Any], handle: Any) -> dict[int, dict[str, Any]]:
        n = self._nvml
        found: dict[int, dict[str, Any]] = {}
        kinds = {
            "compute": n.nvmlDeviceGetComputeRunningProcesses_v3,
            "mps": n.nvmlDeviceGetMPSComputeRunningProcesses_v3,
            "graphics": n.nvmlDeviceGetGraphicsRunningProcesses_v3,
        }
        for kind, call in kinds.items():
            processes, error = self._try(call, handle)
            if error is not None and kind == "compute":
                device["err"]["procs"] = error
            for process in processes or []:
                found.setdefault(process.pid, {"pid": process.pid, "used": process.usedGpuMemory, "kind": kind})
        return found


def _identity(root: str, pid: int) -> dict[str, Any]:
    """Name a process that NVML shows. One of another container, or hidden by the kernel, is not visible here."""
    comm = paths.text(root, f"/proc/{pid}/comm")
    try:
        owner: int | None = os.stat(paths.under(root, f"/proc/{pid}")).st_uid
    except OSError:
        owner = None
    return {"comm": comm, "user": owner, "run": run_of(root, pid) if comm else None, "visible": comm is not None}


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
