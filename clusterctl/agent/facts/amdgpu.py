"""Collects facts of AMD GPUs from the files of the kernel's amdgpu driver, which every user may read.

This module does not use AMD's library. The name and layout of the library change with every release, the library needs
seconds to start, and the library reads the same files as this module. The names and units of the files are documented
in the kernel's `amdgpu_pm.c`, `amdgpu_ras.c` and `amdgpu_fru_eeprom.c`. The kernel's `kgd_pp_interface.h` has the
layouts of the firmware's table `gpu_metrics`. The revision in the first bytes of the table selects the layout. A value
in the table whose bits are all set means that the GPU does not report the value.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct

from clusterctl.agent.facts import gpu_reading_base, kernel_gpu_facts, process_scan
from clusterctl.agent.facts.child_tasks import AbsentError
from clusterctl.agent.facts.gpu_reading_base import FILE_ERROR_NAMES, BaseGpuReading, repeat_doubtful_readings
from clusterctl.agent.facts.kernel_errors import BOGUS_RAS_COUNT
from clusterctl.agent.linux import gpu_devices, kernel_files

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any, Callable

    Calls = dict[str, Callable[["GpuFiles"], Any]]

_THERMAL_BITS = 0xFFFF << 32
"""The bits of `indep_throttle_status` that mean a slowdown by a temperature, or by an overheated regulator or board."""
_COUNTED_CAUSES = ("PROCHOT", "socket temperature", "regulator temperature", "memory temperature")
"""The causes of slow clocks whose duration the firmware counts. The power limit is left out, because a GPU under load
normally reaches this limit.
"""
_SLOWDOWN_COUNTER_OFFSETS = {(1, 6): 36, (1, 7): 44, (1, 8): 44}
"""The byte offset of the five counters in the table, by revision. The counters are PROCHOT, power, socket, regulator
and memory, with four bytes each.
"""
_XGMI_LINK_OFFSETS = {(1, 7): 264, (1, 8): 264}
_MAX_LINKS = 8


class FirmwareMetrics:
    """The values of one reading of the firmware's table.

    Attributes:
        slowdown_causes: The causes that slow the clocks at present; `None` if the layout has counters instead.
        slowdown_counters: The time for which each cause has slowed the clocks; `None` if the layout has no counters.
        xgmi_links: 1 for each XGMI link that is up, and 0 for each other link; `None` if the layout has no links.
    """

    def __init__(self, data: bytes) -> None:
        revision = struct.unpack_from("BB", data, 2) if len(data) >= 4 else (0, 0)
        self.slowdown_causes: list[str] | None = None
        self.slowdown_counters: dict[str, int] | None = None
        self.xgmi_links: list[int] | None = None
        if revision == (1, 3) and (bits := _unpack_at(data, "<Q", 112)) is not None:
            self.slowdown_causes = ["temperature"] if bits & _THERMAL_BITS else []
        if (offset := _SLOWDOWN_COUNTER_OFFSETS.get(revision)) is not None:
            counts = [_unpack_at(data, "<I", offset + 4 * i) for i in (0, 2, 3, 4)]
            self.slowdown_counters = {name: count for name, count in zip(_COUNTED_CAUSES, counts) if count is not None}
        if (offset := _XGMI_LINK_OFFSETS.get(revision)) is not None:
            states = [_unpack_at(data, "<H", offset + 2 * i) for i in range(_MAX_LINKS)]
            self.xgmi_links = [int(state == 1) for state in states if state is not None] or None


def list_slowdown_causes(before: FirmwareMetrics, after: FirmwareMetrics) -> list[str] | None:
    """Return the causes that slowed the clocks between two readings; `None` if the table does not show causes."""
    counts, earlier = after.slowdown_counters, before.slowdown_counters
    if after.slowdown_causes is not None or counts is None or earlier is None:
        return after.slowdown_causes
    return [name for name, count in counts.items() if count > earlier.get(name, count)]


def _unpack_at(data: bytes, layout: str, offset: int) -> int | None:
    """Return a value of the table, or `None` if the value lies beyond the end of the table or has all bits set."""
    size = struct.calcsize(layout)
    if offset + size > len(data) or data[offset : offset + size] == b"\xff" * size:
        return None
    return int(struct.unpack_from(layout, data, offset)[0])


_CONFIG_OF_LOST_DEVICE = b"\xff\xff"
"""The first bytes of the configuration space of a device that is no longer on the bus."""


class GpuFiles:
    """The files of one GPU. Each method `read_…` raises `OSError` if the GPU does not have the value.

    Args:
        root: The prefix of /sys.
        address: The PCI address of the GPU.
    """

    def __init__(self, root: str, address: str) -> None:
        self._root = root
        self.path = kernel_files.join_root(root, f"/sys/bus/pci/devices/{address}")
        names = kernel_files.list_names("/", f"{self.path}/hwmon")
        self._hwmon = f"{self.path}/hwmon/{names[0]}" if names else None
        self._sensors: dict[str, str] = {}
        """The file name prefix of each temperature sensor, by the label of the sensor."""
        for name in kernel_files.list_names("/", self._hwmon or ""):
            if name.startswith("temp") and name.endswith("_label"):
                label = (kernel_files.read_bytes_or_none(f"{self._hwmon}/{name}") or b"").decode().strip()
                self._sensors[label] = name[: -len("_label")]

    def is_asleep(self) -> bool:
        """Return whether the GPU is suspended. Reading most files would wake the GPU, or return wrong values."""
        return kernel_files.read_bytes_or_none(f"{self.path}/power/runtime_status") == b"suspended\n"

    def is_gone(self) -> bool:
        """Return whether the device no longer answers on the bus."""
        try:
            with open(f"{self.path}/config", "rb", buffering=0) as file:
                return file.read(2) == _CONFIG_OF_LOST_DEVICE
        except OSError:
            return False

    def read_text(self, name: str) -> str:
        """Return the text of a file."""
        return str(_require_value(kernel_files.read_bytes(f"{self.path}/{name}").decode("utf-8", "replace").strip()))

    def read_number(self, name: str) -> int:
        """Return the integer in a file."""
        return int(self.read_text(name), 0)

    def read_pcie_width(self, name: str) -> int:
        """Return a width of the PCIe link in lanes. `name` is a key of the result of `read_pcie_link`."""
        return int(_require_value(kernel_gpu_facts.read_pcie_link(os.path.realpath(self.path))[name]))

    def read_sensor(self, name: str) -> int:
        """Return the value of a sensor file, in the unit that the kernel uses."""
        if self._hwmon is None:
            raise OSError(errno.ENOENT, "no sensors")
        return int(kernel_files.read_bytes(f"{self._hwmon}/{name}"))

    def read_temperature(self, label: str, suffix: str) -> float:
        """Return a temperature in degrees Celsius.

        Args:
            label: The sensor: `mem` for the memory, `core` for the hottest sensor of the chip.
            suffix: The kind of value: `input` for the temperature, `crit` for its limit.
        """
        if label == "core":
            label = "junction" if "junction" in self._sensors else "edge"
        return self.read_sensor(f"{self._sensors.get(label, label)}_{suffix}") / 1000

    def read_watts(self, *names: str) -> float:
        """Return the watts of the first existing sensor. On a card with two dies, the second die reports zero."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                return round(int(_require_value(self.read_sensor(name))) / 1e6, 1)
        raise OSError(errno.ENOENT, "no power sensor")

    def read_memory(self) -> dict[str, int]:
        """Return the used and the total memory in bytes; memory that the driver reserves counts as used."""
        used, total = self.read_number("mem_info_vram_used"), self.read_number("mem_info_vram_total")
        if total < gpu_devices.MIN_GPU_MEMORY_BYTES:
            # KFD lists such a GPU only if the GPU may use the main memory, as on Strix Halo.
            return gpu_reading_base.read_shared_memory(self._root)
        return {"used": used, "total": total, "version": 1}

    def read_ras_errors(self) -> dict[str, list[int]]:
        """Return the counts of `[uncorrectable, correctable]` errors since the driver was loaded, by GPU block."""
        counts = {}
        for name in kernel_files.list_names("/", f"{self.path}/ras"):
            if name.endswith("_err_count") or name.startswith("aca_"):
                pair = _parse_counts(kernel_files.read_bytes(f"{self.path}/ras/{name}").decode())
                if pair is not None:
                    counts[name.replace("_err_count", "").replace("aca_", "")] = pair
        _require_value(counts)
        return counts

    def read_bad_pages(self) -> dict[str, int]:
        """Return the numbers of bad memory pages: retired, pending retirement, and failed to retire."""
        lines = kernel_files.read_bytes(f"{self.path}/ras/gpu_vram_bad_pages").decode().splitlines()
        flags = [line.rpartition(":")[2].strip() for line in lines]
        return {name: flags.count(flag) for flag, name in (("R", "retired"), ("P", "pending"), ("F", "failed"))}


def _parse_counts(text: str) -> list[int] | None:
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    numbers = {name.strip(): int(value) for name, value in pairs if value.strip().isdigit()}
    if "ue" not in numbers:
        return None
    return [0 if count % BOGUS_RAS_COUNT == 0 else count for count in (numbers["ue"], numbers.get("ce", 0))]


def _require_value(value: Any) -> Any:
    """Return a value that is neither empty nor zero.

    Raises:
        OSError: The value is empty or zero, so the card does not report this value.
    """
    if not value:
        raise OSError(errno.ENOENT, "no value")
    return value


SAMPLED_VALUES: Calls = {
    "util": lambda gpu: gpu.read_number("gpu_busy_percent"),
    "memory": lambda gpu: gpu.read_memory(),
    "temp": lambda gpu: gpu.read_temperature("core", "input"),
    "temp_max": lambda gpu: gpu.read_temperature("core", "crit"),
    "mem_temp": lambda gpu: gpu.read_temperature("mem", "input"),
    "mem_temp_max": lambda gpu: gpu.read_temperature("mem", "crit"),
    "power_w": lambda gpu: gpu.read_watts("power1_average", "power1_input"),
    "sm_clock": lambda gpu: gpu.read_sensor("freq1_input") // 1_000_000,
    "ras": lambda gpu: gpu.read_ras_errors(),
}
"""The functions that read the values of a sample from the files of a GPU, by name of the value."""
SUSPENDED_VALUES: Calls = {
    "name": lambda gpu: gpu.read_text("product_name"),
    "serial": lambda gpu: gpu.read_text("serial_number"),
    "vbios": lambda gpu: gpu.read_text("vbios_version"),
    "subsystem": lambda gpu: f"{gpu.read_number('subsystem_device'):04x}{gpu.read_number('subsystem_vendor'):04x}",
    "pcie_width": lambda gpu: gpu.read_pcie_width("width"),
    "pcie_width_max": lambda gpu: gpu.read_pcie_width("max_width"),
}
"""The functions that read the values which a suspended GPU still reports, by name of the value."""
ALL_VALUES: Calls = {
    **SAMPLED_VALUES,
    **SUSPENDED_VALUES,
    "power_limit_w": lambda gpu: gpu.read_watts("power1_cap"),
    "power_default_w": lambda gpu: gpu.read_watts("power1_cap_default"),
    "bad_pages": lambda gpu: gpu.read_bad_pages(),
    "modes": lambda gpu: [gpu.read_text(f"current_{kind}_partition") for kind in ("compute", "memory")],
}
"""The functions that read all values for the health checks before a run, by name of the value."""


_KFD = "/dev/kfd"


def collect_amdgpu(root: str, expects_gpus: bool) -> dict[str, Any]:
    """Return the facts of the group `amdgpu`.

    Raises:
        AbsentError: The request expects no GPU.
    """
    if not expects_gpus:
        raise AbsentError("the request expects no GPU")
    reader = AmdGpuReader(root)
    readings = reader.read_gpus()
    nodes = [_KFD, *(f"/dev/dri/renderD{gpu['render']}" for gpu in reader.gpus)]
    return {
        "driver": kernel_files.read_text(root, "/sys/module/amdgpu/version"),
        "count": len(readings),
        "hidden": reader.hidden,
        "dev": [{"path": path, "access": kernel_files.check_device_permission(root, path)} for path in nodes],
        "numa_balancing": kernel_files.read_int(root, "/proc/sys/kernel/numa_balancing"),
        "devices": [reading.to_facts() for reading in readings],
    }


class AmdGpuReader:
    """Reads the AMD GPUs of this machine repeatedly, with the same methods for samples as `NvmlGpuReader`.

    Args:
        root: The prefix of /sys, /proc and /dev.
    """

    vendor = "amd"
    init_error: int | None = None

    def __init__(self, root: str) -> None:
        self._root = root
        self.gpus, self.hidden = gpu_devices.list_amd_gpus(root)
        self._has_own_pid_namespace = process_scan.has_own_pid_namespace(root)
        self._metrics: dict[int, FirmwareMetrics | None] = {}
        self._links: dict[int, int] = {}

    @property
    def indices(self) -> list[int]:
        """The indices of the GPUs."""
        return [gpu["index"] for gpu in self.gpus]

    def read_gpus(self) -> list[AmdGpuReading]:
        """Return a reading of all values of every GPU."""
        by_node = {gpu["node"]: gpu["index"] for gpu in self.gpus}
        readings = [AmdGpuReading(self._root, gpu).read_all(self.list_gpu_processes(gpu)) for gpu in self.gpus]
        for reading, gpu in zip(readings, self.gpus):
            reading.values["xgmi"] = gpu_devices.list_xgmi_links(self._root, gpu, by_node)
        repeat_doubtful_readings(readings)
        return readings

    def read_samples(self) -> list[dict[str, Any]]:
        """Return the sampled values of every GPU as facts."""
        devices = []
        for gpu in self.gpus:
            reading = AmdGpuReading(self._root, gpu, self._metrics.get(gpu["index"])).read_sample_values()
            self._metrics[gpu["index"]] = reading.metrics
            self._links[gpu["index"]] = sum(reading.values.get("xgmi_links") or [])
            devices.append(reading.to_facts())
        return devices

    def count_active_links(self, index: int) -> int:
        """Return the number of XGMI links of a GPU that were up in the last sample."""
        if index not in self._links:
            self.read_samples()
        return self._links.get(index, 0)

    def read_memory_and_processes(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return the memory use and the processes of the GPUs in `indices`, without GPUs that do not answer."""
        entries = []
        for gpu in self.gpus:
            if gpu["index"] in indices:
                memory = AmdGpuReading(self._root, gpu).read_memory()
                if memory is not None:
                    entries.append({"gpu": gpu["index"], **memory, "procs": self.list_gpu_processes(gpu)})
        return entries

    def list_gpu_processes(self, gpu: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the processes that use memory of a GPU."""

        def describe(pid: int) -> dict[str, Any]:
            # The kernel reports pids of the machine. In a container such a pid may belong to another process.
            return (
                gpu_reading_base.UNKNOWN_PROCESS
                if self._has_own_pid_namespace
                else gpu_reading_base.describe_gpu_process(self._root, pid)
            )

        return [
            {"pid": pid, "used": used, "kind": "compute", **describe(pid)}
            for pid, used in gpu_devices.list_gpu_memory_holders(self._root, gpu["gpu_id"]).items()
        ]


class AmdGpuReading(BaseGpuReading):
    """The values of one AMD GPU at one moment.

    Args:
        root: The prefix of /sys.
        gpu: The description of the GPU from `gpu_devices.list_amd_gpus`.
        before: The firmware's table in the previous reading, or `None`.

    Attributes:
        metrics: The firmware's table, or `None` if the GPU has no table.
    """

    def __init__(self, root: str, gpu: dict[str, Any], before: FirmwareMetrics | None = None) -> None:
        super().__init__("amd", gpu["index"], FILE_ERROR_NAMES)
        self._gpu, self._files = gpu, GpuFiles(root, gpu["pci"])
        self.values = {name: gpu[name] for name in ("uuid", "pci") if gpu[name]}
        self.metrics = before
        self._has_counters = False

    def read_all(self, holders: list[dict[str, Any]]) -> AmdGpuReading:
        """Read all values that the health checks before a run need."""
        plate = {"minor": self._gpu["render"], "gfx": self._gpu["gfx"], "hive": self._gpu["hive"]}
        self.values.update(plate, partition=self._gpu["partition"], procs=holders)
        self._read_if_present(SUSPENDED_VALUES if self._files.is_asleep() else ALL_VALUES)
        # Virtual functions and some cards report no name.
        if "name" not in self.values:
            self.codes.pop("name", None)
            self.values["name"] = f"AMD {self._gpu['gfx']} ({self._gpu['device']})"
        return self

    def read_sample_values(self) -> AmdGpuReading:
        """Read the values of a sample."""
        self._read_if_present({} if self._files.is_asleep() else SAMPLED_VALUES)
        return self

    def read_memory(self) -> dict[str, int] | None:
        """Return the used and the total memory in bytes, or `None` if the GPU does not answer."""
        self._read({"memory": SAMPLED_VALUES["memory"]})
        return self.values.get("memory")

    def is_doubtful(self) -> bool:  # type: ignore[explicit-override]  # the mark would have to be imported
        """Return whether a second reading is necessary: an error may be transient, or a slowdown needs two readings."""
        return super().is_doubtful() or (self._has_counters and "slowdown" not in self.values)

    def reread_values(self, names: list[str]) -> None:  # type: ignore[explicit-override]
        """Read the values in `names` and the firmware's table again."""
        self._read({name: ALL_VALUES[name] for name in names if name in ALL_VALUES})
        self._read_firmware()

    def _read_if_present(self, calls: Calls) -> None:
        if self._files.is_gone():
            # Each query of a missing device may take seconds, so do not read further values.
            self.codes["config"] = errno.ENODEV
            return
        self._read(calls)
        if calls:
            self._read_firmware()

    def _read(self, calls: Calls) -> None:
        for name, call in calls.items():
            try:
                self.set_value(name, call(self._files), None)
            except OSError as error:
                self.codes[name] = error.errno or errno.EIO
            except ValueError:
                # The content of the file is not in the documented format.
                self.codes[name] = errno.EBADMSG
        if "ras" in self.values and "ras" in calls:
            blocks = self.values["ras"].values()
            self.values.update(ecc_unc=sum(b[0] for b in blocks), ecc_cor=sum(b[1] for b in blocks))

    def _read_firmware(self) -> None:
        before = self.metrics
        try:
            self.metrics = FirmwareMetrics(kernel_files.read_bytes(f"{self._files.path}/gpu_metrics"))
        except OSError:
            # The GPU has no table `gpu_metrics`.
            return
        self._has_counters = self.metrics.slowdown_counters is not None
        slowdown = list_slowdown_causes(before or self.metrics, self.metrics)
        if slowdown is not None and (before is not None or not self._has_counters):
            self.values["slowdown"] = slowdown
        if self.metrics.xgmi_links is not None:
            self.values["xgmi_links"] = self.metrics.xgmi_links
