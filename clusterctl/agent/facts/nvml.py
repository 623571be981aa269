"""Collects facts of NVIDIA GPUs from NVML. If a call fails, this module stores the error and makes the other calls.

NVIDIA's `nvml.h` documents calls, field numbers and structures. Like `amdgpu`, this module has a collect function and a
reader class. A module for another vendor needs such a function and class.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time

from clusterctl.agent.facts import gpu_reading_base
from clusterctl.agent.facts.child_tasks import AbsentError
from clusterctl.agent.facts.gpu_reading_base import NVML_ERROR_NAMES, BaseGpuReading, repeat_doubtful_readings
from clusterctl.agent.linux import kernel_files

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any, Callable

    Call = Callable[[Any, Any], Any]


def _import_bindings() -> Any:
    try:
        # `pynvml` has 8,000 lines, and only a node with NVIDIA's library needs it.
        import pynvml
    except ImportError as error:
        raise AbsentError("nvidia-ml-py is neither in the agent's archive nor in the job's Python") from error
    return pynvml


FIELD_RECOVERY_ACTION = 230
FIELD_MEMORY_TEMP = 82
_RETIRED_SBE, _RETIRED_DBE = 29, 30
_TLIMIT_SHUTDOWN, _TLIMIT_SLOWDOWN, _TLIMIT_MEM_MAX, _TLIMIT_GPU_MAX = 193, 194, 195, 196

SAMPLED_FIELDS = {FIELD_RECOVERY_ACTION: "recovery_action", FIELD_MEMORY_TEMP: "mem_temp"}
"""The names of values that NVML provides only as numbered fields. Each field has a return code of its own."""
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


def _read_ecc_errors(n: Any, gpu: Any, kind: int, counter: int) -> Any:
    return n.nvmlDeviceGetTotalEccErrors(gpu, kind, counter)


def _read_threshold(n: Any, gpu: Any, kind: int) -> Any:
    return n.nvmlDeviceGetTemperatureThreshold(gpu, kind)


def read_memory(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the used and total memory (bytes). Version 1 of the call counts the driver's reserve as used."""
    try:
        info, version = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2), 2
    except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported):
        info, version = nvml.nvmlDeviceGetMemoryInfo(handle), 1
    return {"used": info.used, "total": info.total, "version": version}


def _read_slowdown_reasons(n: Any, handle: Any) -> int:
    try:
        return int(n.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except n.NVMLError_FunctionNotFound:
        return int(n.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _read_sram_errors(n: Any, handle: Any) -> dict[str, int]:
    status = n.c_nvmlEccSramErrorStatus_v1_t()
    n.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    unc = status.aggregateUncParity + status.aggregateUncSecDed
    return {"unc": unc, "threshold": status.bThresholdExceeded}


def _count_spare_rows(n: Any, handle: Any) -> dict[str, int]:
    """Return the number of memory banks for each amount of spare rows (`max`, `high`, `partial`, `low`, `none`)."""
    banks = n.nvmlDeviceGetRowRemapperHistogram(handle)
    return {name: getattr(banks, name) for name in ("max", "high", "partial", "low", "none")}


def _read_fabric(n: Any, handle: Any) -> dict[str, Any]:
    info = n.c_nvmlGpuFabricInfo_v3_t()
    try:
        n.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except n.NVMLError as error:
        if error.value not in (n.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, n.NVML_ERROR_INVALID_ARGUMENT):
            raise
        info = n.c_nvmlGpuFabricInfo_v2_t()
        n.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    cluster = bytes(info.clusterUuid).hex()
    return {
        "state": info.state,
        "status": info.status,
        "health": getattr(info, "healthSummary", 0),
        # The cluster id is zero if the fabric contains this machine only.
        "cluster": cluster if cluster.strip("0") else None,
        "clique": info.cliqueId,
    }


def decode_text(value: Any) -> Any:
    """Return bytes as text, and any other value unchanged."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


SAMPLED_VALUES: dict[str, Call] = {
    "uuid": lambda n, gpu: decode_text(n.nvmlDeviceGetUUID(gpu)),
    "util": lambda n, gpu: n.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory": read_memory,
    "temp": lambda n, gpu: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU),
    "power_w": lambda n, gpu: n.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "sm_clock": lambda n, gpu: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_SM),
    "pcie_width": lambda n, gpu: n.nvmlDeviceGetCurrPcieLinkWidth(gpu),
    "pcie_gen": lambda n, gpu: n.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
    "throttle": _read_slowdown_reasons,
    "ecc_unc": lambda n, gpu: _read_ecc_errors(n, gpu, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC),
    "remapped": lambda n, gpu: list(n.nvmlDeviceGetRemappedRows(gpu)),
}
"""The NVML call for each value of a sample. `n` is the module of NVML's Python bindings, `gpu` is the handle of a GPU.
"""
ALL_VALUES: dict[str, Call] = {
    **SAMPLED_VALUES,
    "throttle": lambda n, gpu: [_read_slowdown_reasons(n, gpu)],
    "serial": lambda n, gpu: decode_text(n.nvmlDeviceGetSerial(gpu)),
    "name": lambda n, gpu: decode_text(n.nvmlDeviceGetName(gpu)),
    "pci": lambda n, gpu: decode_text(n.nvmlDeviceGetPciInfo(gpu).busId).lower(),
    "subsystem": lambda n, gpu: f"{n.nvmlDeviceGetPciInfo(gpu).pciSubSystemId:08x}",
    "vbios": lambda n, gpu: decode_text(n.nvmlDeviceGetVbiosVersion(gpu)),
    "minor": lambda n, gpu: n.nvmlDeviceGetMinorNumber(gpu),
    "capability": lambda n, gpu: list(n.nvmlDeviceGetCudaComputeCapability(gpu)),
    "ecc_mode": lambda n, gpu: list(n.nvmlDeviceGetEccMode(gpu)),
    "ecc_default": lambda n, gpu: n.nvmlDeviceGetDefaultEccMode(gpu)[0],
    "ecc_cor": lambda n, gpu: _read_ecc_errors(n, gpu, n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_VOLATILE_ECC),
    "ecc_unc_aggregate": lambda n, gpu: _read_ecc_errors(
        n, gpu, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_AGGREGATE_ECC
    ),
    "sram": _read_sram_errors,
    "rows": _count_spare_rows,
    "retired_pending": lambda n, gpu: n.nvmlDeviceGetRetiredPagesPendingStatus(gpu),
    "inforom": lambda n, gpu: n.nvmlDeviceValidateInforom(gpu) is None,
    "repair": lambda n, gpu: list(n.nvmlDeviceGetRepairStatus(gpu)),
    "temp_slowdown": lambda n, gpu: _read_threshold(n, gpu, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
    "temp_max": lambda n, gpu: _read_threshold(n, gpu, n.NVML_TEMPERATURE_THRESHOLD_GPU_MAX),
    "mem_temp_max": lambda n, gpu: _read_threshold(n, gpu, n.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
    "margin": lambda n, gpu: n.nvmlDeviceGetMarginTemperature(gpu),
    "power_limit_w": lambda n, gpu: n.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "power_default_w": lambda n, gpu: n.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000,
    "pstate": lambda n, gpu: n.nvmlDeviceGetPerformanceState(gpu),
    "sm_clock_max": lambda n, gpu: n.nvmlDeviceGetMaxClockInfo(gpu, n.NVML_CLOCK_SM),
    "pcie_width_max": lambda n, gpu: n.nvmlDeviceGetMaxPcieLinkWidth(gpu),
    "pcie_gen_max": lambda n, gpu: n.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    "fabric": _read_fabric,
    "persistence": lambda n, gpu: n.nvmlDeviceGetPersistenceMode(gpu),
    "mig": lambda n, gpu: list(n.nvmlDeviceGetMigMode(gpu)),
    "compute_mode": lambda n, gpu: n.nvmlDeviceGetComputeMode(gpu),
}
"""The NVML call for each value that the health checks before a run need."""


HARDWARE_SLOWDOWN_BITS = 0x8 | 0x40 | 0x80
"""The bits of clock events that mean a slowdown by hardware: any, thermal, power brake."""

_P2P_READ, _P2P_NVLINK = 0, 2  # The bindings' own constant is a tuple by mistake: a stray comma.
_MAX_LINKS = 36
_BINDINGS_FAILED = 2
"""The error code of this module if the bindings cannot make a call."""
_INVALID_ARGUMENT = 2


class NvmlGpuReading(BaseGpuReading):
    """The values of one NVIDIA GPU at one moment.

    Args:
        nvml: The module of the bindings.
        index: NVML's index of the GPU.
        handle: The handle of the GPU and `None`; if NVML returned no handle, `None` and NVML's error code.
        root: The prefix of /proc.
    """

    def __init__(self, nvml: Any, index: int, handle: tuple[Any, int | None], root: str = "/") -> None:
        super().__init__("nvidia", index, NVML_ERROR_NAMES)
        self._nvml, self._root = nvml, root
        self.handle, error = handle
        if error is not None:
            self.codes["handle"] = error

    def read_all(self) -> NvmlGpuReading:
        """Read all values that the health checks before a run need."""
        if self.handle is not None:
            self._read(ALL_VALUES)
            self._read_fields(FIELDS)
            # Combine the counts of retired pages with single-bit and double-bit errors into one value.
            counts = [self.values.pop(name, None) for name in ("retired_sbe", "retired_dbe")]
            codes = [self.codes.pop(name, None) for name in ("retired_sbe", "retired_dbe")]
            self.set_value("retired", counts, next((code for code in codes if code is not None), None))
            states = self.read_nvlink_states()
            self.set_value("nvlinks", states, None if states else self._nvml.NVML_ERROR_NOT_SUPPORTED)
            self.read_processes()
        return self

    def read_sample_values(self) -> NvmlGpuReading:
        """Read the values of a sample."""
        if self.handle is not None:
            self._read(SAMPLED_VALUES)
            self._read_fields(SAMPLED_FIELDS)
        return self

    def is_doubtful(self) -> bool:  # type: ignore[explicit-override]  # the mark would have to be imported
        """Return whether a value may be transient: an error, a hardware slowdown or an invisible process."""
        slowed = any(bits & HARDWARE_SLOWDOWN_BITS for bits in self.values.get("throttle") or [])
        hidden = any(not entry["visible"] for entry in self.values.get("procs") or [])
        return slowed or hidden or super().is_doubtful()

    def reread_values(self, names: list[str]) -> None:  # type: ignore[explicit-override]
        """Read the values in `names` again, and also hardware slowdowns and invisible processes."""
        if self.handle is None:
            self.handle, error = try_call(self._nvml, self._nvml.nvmlDeviceGetHandleByIndex, self._index)
            if error is None:
                self.odd["handle"] = self.codes.pop("handle")
                self.read_all()
            return
        self._read({name: ALL_VALUES[name] for name in names if name in ALL_VALUES})
        self._read_fields({number: name for number, name in FIELDS.items() if name in names})
        slowdowns = self.values.get("throttle")
        if slowdowns and slowdowns[0] & HARDWARE_SLOWDOWN_BITS:
            slowdowns.append(try_call(self._nvml, _read_slowdown_reasons, self._nvml, self.handle)[0] or 0)
        procs = self.values.get("procs") or []
        if not all(entry["visible"] for entry in procs):
            listed = self._list_processes()
            # An invisible process that is missing in the second list has ended.
            self.values["procs"] = [entry for entry in procs if entry["visible"] or entry["pid"] in listed]

    def read_nvlink_states(self) -> list[int | None]:
        """Return the state of each NVLink of the card (1: up); `None` for a missing link between others."""
        states: list[int | None] = []
        for link in range(_MAX_LINKS):
            state, error = try_call(self._nvml, self._nvml.nvmlDeviceGetNvLinkState, self.handle, link)
            # Links with higher numbers may follow an unsupported link.
            if error is not None and self.get_error_name(error) != gpu_reading_base.UNSUPPORTED:
                break
            states.append(state)
        while states and states[-1] is None:
            states.pop()
        return states

    def read_processes(self) -> list[dict[str, Any]]:
        """Return the processes that the driver lists for this GPU."""
        listed = self._list_processes()
        if "procs" not in self.codes:
            self.values["procs"] = [
                {**entry, **gpu_reading_base.describe_gpu_process(self._root, pid)} for pid, entry in listed.items()
            ]
        return self.values.get("procs") or []

    def _read(self, calls: dict[str, Call]) -> None:
        for name, call in calls.items():
            self.set_value(name, *try_call(self._nvml, call, self._nvml, self.handle))
        if "memory" in calls and self.get_error_name(self.codes.get("memory", 0)) == gpu_reading_base.UNSUPPORTED:
            # GPUs with unified memory, such as GB10, have no memory of their own.
            self.set_value("memory", gpu_reading_base.read_shared_memory(self._root), None)

    def _read_fields(self, wanted: dict[int, str]) -> None:
        if not wanted:
            return
        fields, error = try_call(self._nvml, self._nvml.nvmlDeviceGetFieldValues, self.handle, list(wanted))
        if error is not None:
            self.codes.update(dict.fromkeys(wanted.values(), error))
            return
        for answer in fields:
            number, code = answer.fieldId, answer.nvmlReturn
            # An older driver returns this code for an unknown field.
            newer = code == _INVALID_ARGUMENT
            error = None if code == 0 else self._nvml.NVML_ERROR_NOT_SUPPORTED if newer else code
            value = answer.value.siVal if number in _SIGNED else answer.value.uiVal
            self.set_value(wanted[number], int(value), error)

    def _list_processes(self) -> dict[int, dict[str, Any]]:
        n = self._nvml
        found: dict[int, dict[str, Any]] = {}
        for kind, call in (
            ("compute", n.nvmlDeviceGetComputeRunningProcesses_v3),
            ("mps", n.nvmlDeviceGetMPSComputeRunningProcesses_v3),
            ("graphics", n.nvmlDeviceGetGraphicsRunningProcesses_v3),
        ):
            processes, error = try_call(n, call, self.handle)
            if error is not None and kind == "compute":
                self.codes["procs"] = error
            for process in processes or []:
                found.setdefault(process.pid, {"pid": process.pid, "used": process.usedGpuMemory, "kind": kind})
        return found


def try_call(nvml: Any, call: Callable[..., Any], *arguments: Any) -> tuple[Any, int | None]:
    """Return the result of an NVML call and `None`, or `None` and the error code."""
    try:
        return call(*arguments), None
    except nvml.NVMLError as error:
        return None, error.value
    except (ctypes.ArgumentError, AttributeError, TypeError):
        return None, _BINDINGS_FAILED


_MAX_EVENTS = 64
"""The maximum number of XID events that one call reads, because a dying GPU may report events without end."""


class XidWatcher:
    """Receives the XID errors of all GPUs. NVML must be initialised."""

    def __init__(self, handles: list[Any]) -> None:
        self._nvml = _import_bindings()
        self._indices = {_get_address(handle): index for index, handle in enumerate(handles) if handle is not None}
        self._set: Any = None
        try:
            events = self._nvml.nvmlEventSetCreate()
            for handle in filter(None, handles):
                # A GPU that does not support events must not prevent the events of other GPUs.
                with contextlib.suppress(self._nvml.NVMLError):
                    self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, events)
            self._set = events
        except (self._nvml.NVMLError, AttributeError):
            # Old drivers and some virtual GPUs have no events. Samples and the kernel log still show errors.
            return

    def take_xid_errors(self) -> list[dict[str, Any]]:
        """Return the XID errors since the last call: `[{"gpu": index or None, "xid": code}]`."""
        errors: list[dict[str, Any]] = []
        while self._set is not None and len(errors) < _MAX_EVENTS:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError:
                # The call waits 0 ms and has timed out, so no event is left.
                break
            if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                errors.append({"gpu": self._indices.get(_get_address(event.device)), "xid": int(event.eventData)})
        return errors


def _get_address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


LIBRARY = "libnvidia-ml.so.1"
LIBRARY_NOT_FOUND = 12


def collect_nvml(root: str, expects_gpus: bool) -> dict[str, Any]:
    """Return the facts of the group `nvml`.

    Raises:
        AbsentError: The request expects no GPU, or NVML or its Python bindings are missing.
    """
    if not expects_gpus:
        raise AbsentError("the request expects no GPU")
    if not _has_library():
        return {"init_error": LIBRARY_NOT_FOUND, "devices": []}
    reader = NvmlGpuReader()
    if reader.init_error is not None:
        return {"init_error": reader.init_error, "devices": []}
    readings = reader.read_gpus(root)
    devices = [reading.to_facts() for reading in readings]
    return {
        **reader.read_library_facts(),
        "devices": devices,
        "p2p": reader.read_p2p_status(readings),
        "uvm": kernel_files.probe_device_open(root, "/dev/nvidia-uvm"),
    }


def open_nvml_reader() -> NvmlGpuReader | str:
    """Return an open reader. If NVML or its Python bindings are missing, return a text with the reason."""
    if not _has_library():
        return "there is no NVIDIA driver library"
    try:
        return NvmlGpuReader()
    except AbsentError as error:
        return str(error)


def _has_library() -> bool:
    """Return whether NVML can be loaded. If not, the slow import of the Python bindings is not necessary."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


class NvmlGpuReader:
    """Initialises NVML, gets the handles of the NVIDIA GPUs of this machine, and then reads the GPUs repeatedly.

    Attributes:
        init_error: The error code of the initialisation, or `None`.
        init_ms: The duration of the initialisation in milliseconds. Without persistence mode, this duration includes
            the start of each GPU.
    """

    vendor = "nvidia"

    def __init__(self) -> None:
        self._nvml = _import_bindings()
        self.init_error: int | None = None
        self.init_ms = 0.0
        began = time.monotonic()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self.init_error = error.value
            return
        self.count = try_call(self._nvml, self._nvml.nvmlDeviceGetCount)
        self.handles = [
            try_call(self._nvml, self._nvml.nvmlDeviceGetHandleByIndex, i) for i in range(self.count[0] or 0)
        ]
        self.init_ms = round((time.monotonic() - began) * 1000, 1)

    @property
    def indices(self) -> list[int]:
        """The indices of the GPUs."""
        return list(range(len(self.handles)))

    def read_library_facts(self) -> dict[str, Any]:
        """Return the versions of driver and library, the number of GPUs, and the duration of the initialisation."""
        n = self._nvml
        cuda, cuda_error = try_call(n, n.nvmlSystemGetCudaDriverVersion_v2)
        return {
            "init_error": None,
            "init_ms": self.init_ms,
            "driver": decode_text(try_call(n, n.nvmlSystemGetDriverVersion)[0]),
            "nvml": decode_text(try_call(n, n.nvmlSystemGetNVMLVersion)[0]),
            "cuda": cuda,
            "cuda_error": cuda_error,
            "count": self.count[0],
            "count_error": self.count[1],
        }

    def read_gpus(self, root: str = "/") -> list[NvmlGpuReading]:
        """Return a reading of all values of every GPU."""
        readings = [
            NvmlGpuReading(self._nvml, index, handle, root).read_all() for index, handle in enumerate(self.handles)
        ]
        repeat_doubtful_readings(readings)
        return readings

    def read_samples(self) -> list[dict[str, Any]]:
        """Return the sampled values of every GPU as facts."""
        return [
            NvmlGpuReading(self._nvml, i, handle).read_sample_values().to_facts()
            for i, handle in enumerate(self.handles)
        ]

    def count_active_links(self, index: int) -> int:
        """Return the number of NVLinks of a GPU that are up."""
        handle = self.handles[index]
        return (
            0
            if handle[0] is None
            else sum(state == 1 for state in NvmlGpuReading(self._nvml, index, handle).read_nvlink_states())
        )

    def read_memory_and_processes(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return the memory use and the processes of the GPUs in `indices`, without GPUs that do not answer."""
        entries = []
        for index in indices:
            if index >= len(self.handles) or self.handles[index][0] is None:
                continue
            memory = try_call(self._nvml, read_memory, self._nvml, self.handles[index][0])[0]
            if memory is not None:
                procs = NvmlGpuReading(self._nvml, index, self.handles[index]).read_processes()
                entries.append({"gpu": index, **memory, "procs": procs})
        return entries

    def read_p2p_status(self, readings: list[NvmlGpuReading]) -> list[list[int | None]]:
        """Return `[i, j, NVLink status, read status]` for every pair of GPUs. An unknown status is `None`."""
        n = self._nvml
        pairs: list[list[int | None]] = []
        for (i, one), (j, other) in itertools.combinations(enumerate(readings), 2):
            if one.handle is not None and other.handle is not None:
                both = (one.handle, other.handle)
                status = [try_call(n, n.nvmlDeviceGetP2PStatus, *both, kind)[0] for kind in (_P2P_NVLINK, _P2P_READ)]
                pairs.append([i, j, *status])
        return pairs
