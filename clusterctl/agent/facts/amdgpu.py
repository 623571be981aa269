"""Facts of AMD GPUs from the files of the kernel's amdgpu driver, which every user may read.

The vendor's library is not used: its name and layout change with every release, it takes seconds to start, and it reads
the same files. Names and units are those of the kernel: `amdgpu_pm.c`, `amdgpu_ras.c`, `amdgpu_fru_eeprom.c`. The
layouts of the firmware file `gpu_metrics` are those of `kgd_pp_interface.h`, selected by the revision in its first
bytes; a value with all bits set is absent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct

from clusterctl.agent.facts import driver, gpu_values, processes
from clusterctl.agent.facts.child_tasks import AbsentError
from clusterctl.agent.facts.gpu_values import FILE_WORDS, GpuReading, repeat_doubtful_readings
from clusterctl.agent.facts.hardware_errors import BOGUS
from clusterctl.agent.linux import gpu_devices, kernel_files

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any, Callable

    Calls = dict[str, Callable[["GpuFiles"], Any]]

_THERMAL_BITS = 0xFFFF << 32
"""The bits of `indep_throttle_status` for temperatures, and for an overheated regulator or board."""
_COUNTERS = ("PROCHOT", "socket temperature", "regulator temperature", "memory temperature")
"""The causes that are counted by the time they slowed the clocks. The power limit, normal under load, is left out."""
_RESIDENCIES = {(1, 6): 36, (1, 7): 44, (1, 8): 44}
"""Where the counters begin: PROCHOT, power, socket, regulator, memory, four bytes each."""
_LINKS = {(1, 7): 264, (1, 8): 264}
_MAX_LINKS = 8


class FirmwareMetrics:
    """One reading of the firmware's table.

    Attributes:
        slowed: The causes that slow the clocks now; `None` if the layout counts them instead.
        counters: How long each cause has slowed the clocks, if the layout counts them.
        links: 1 for each XGMI link that is up, 0 for others; `None` if the layout does not say.
    """

    def __init__(self, data: bytes) -> None:
        revision = struct.unpack_from("BB", data, 2) if len(data) >= 4 else (0, 0)
        self.slowed: list[str] | None = None
        self.counters: dict[str, int] | None = None
        self.links: list[int] | None = None
        if revision == (1, 3) and (bits := _unpack_at(data, "<Q", 112)) is not None:
            self.slowed = ["temperature"] if bits & _THERMAL_BITS else []
        if (offset := _RESIDENCIES.get(revision)) is not None:
            counts = [_unpack_at(data, "<I", offset + 4 * i) for i in (0, 2, 3, 4)]
            self.counters = {name: count for name, count in zip(_COUNTERS, counts) if count is not None}
        if (offset := _LINKS.get(revision)) is not None:
            states = [_unpack_at(data, "<H", offset + 2 * i) for i in range(_MAX_LINKS)]
            self.links = [int(state == 1) for state in states if state is not None] or None


def name_slowdowns(before: FirmwareMetrics, after: FirmwareMetrics) -> list[str] | None:
    """Return the causes that slowed the clocks between two readings; `None` if the layout does not say."""
    if after.slowed is not None or after.counters is None or before.counters is None:
        return after.slowed
    return [name for name, count in after.counters.items() if count > before.counters.get(name, count)]


def _unpack_at(data: bytes, form: str, offset: int) -> int | None:
    """Return a value of the table, or `None` if it is absent: beyond its end, or with all bits set."""
    size = struct.calcsize(form)
    if offset + size > len(data) or data[offset : offset + size] == b"\xff" * size:
        return None
    return int(struct.unpack_from(form, data, offset)[0])


_GONE = b"\xff\xff"
"""The content of the configuration space of a device that has fallen off the bus."""


class GpuFiles:
    """The files of one GPU.

    Args:
        root: Prefix of /sys.
        address: Its PCI address.
    """

    def __init__(self, root: str, address: str) -> None:
        self.place = kernel_files.join_root(root, f"/sys/bus/pci/devices/{address}")
        names = kernel_files.list_names("/", f"{self.place}/hwmon")
        self._hwmon = f"{self.place}/hwmon/{names[0]}" if names else None
        self._sensors: dict[str, str] = {}
        """The file name prefix of each temperature, by its label."""
        for name in kernel_files.list_names("/", self._hwmon or ""):
            if name.startswith("temp") and name.endswith("_label"):
                label = (kernel_files.read_bytes_or_none(f"{self._hwmon}/{name}") or b"").decode().strip()
                self._sensors[label] = name[: -len("_label")]

    def is_asleep(self) -> bool:
        """Return whether the GPU is suspended. Reading it would wake it, or give nonsense."""
        return kernel_files.read_bytes_or_none(f"{self.place}/power/runtime_status") == b"suspended\n"

    def is_gone(self) -> bool:
        """Return whether the device no longer answers on the bus."""
        try:
            with open(f"{self.place}/config", "rb", buffering=0) as file:
                return file.read(2) == _GONE
        except OSError:
            return False

    def read_text(self, name: str) -> str:
        """Return the text of a file; like all readers here, it raises `OSError` if there is none."""
        return str(_require_value(kernel_files.read_bytes(f"{self.place}/{name}").decode("utf-8", "replace").strip()))

    def read_number(self, name: str) -> int:
        """Return the number in a file."""
        return int(self.read_text(name), 0)

    def read_link(self, name: str) -> int:
        """Return a width of the PCIe link."""
        return int(_require_value(driver.read_pcie_link(os.path.realpath(self.place))[name]))

    def read_sensor(self, name: str) -> int:
        """Return the value of a sensor, in the unit of the kernel."""
        if self._hwmon is None:
            raise OSError(errno.ENOENT, "no sensors")
        return int(kernel_files.read_bytes(f"{self._hwmon}/{name}"))

    def read_degrees(self, label: str, what: str) -> float:
        """Return a temperature: of the memory (`mem`), or of the hottest place of the chip that has a sensor."""
        if label == "core":
            label = "junction" if "junction" in self._sensors else "edge"
        return self.read_sensor(f"{self._sensors.get(label, label)}_{what}") / 1000

    def read_watts(self, *names: str) -> float:
        """Return the power from the first of these sensors that exists. Of two dies, the second reports zero."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                return round(int(_require_value(self.read_sensor(name))) / 1e6, 1)
        raise OSError(errno.ENOENT, "no power sensor")

    def read_memory(self) -> dict[str, int]:
        """Return used and total bytes. As in NVML's first version, memory that the driver reserves counts as used."""
        used, total = self.read_number("mem_info_vram_used"), self.read_number("mem_info_vram_total")
        return {"used": used, "total": total, "version": 1}

    def read_ras(self) -> dict[str, list[int]]:
        """Return errors since the driver was loaded: `[uncorrectable, correctable]` of each block that counts them."""
        counts = {}
        for name in kernel_files.list_names("/", f"{self.place}/ras"):
            if name.endswith("_err_count") or name.startswith("aca_"):
                pair = _parse_counts(kernel_files.read_bytes(f"{self.place}/ras/{name}").decode())
                if pair is not None:
                    counts[name.replace("_err_count", "").replace("aca_", "")] = pair
        _require_value(counts)
        return counts

    def read_bad_pages(self) -> dict[str, int]:
        """Return the numbers of bad memory pages: retired, pending, and those that could not be retired."""
        lines = kernel_files.read_bytes(f"{self.place}/ras/gpu_vram_bad_pages").decode().splitlines()
        flags = [line.rpartition(":")[2].strip() for line in lines]
        return {name: flags.count(flag) for flag, name in (("R", "retired"), ("P", "pending"), ("F", "failed"))}


def _parse_counts(text: str) -> list[int] | None:
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    numbers = {name.strip(): int(value) for name, value in pairs if value.strip().isdigit()}
    if "ue" not in numbers:
        return None
    return [0 if count % BOGUS == 0 else count for count in (numbers["ue"], numbers.get("ce", 0))]


def _require_value(value: Any) -> Any:
    """Return a value unless it is empty or zero.

    Raises:
        OSError: It is empty or zero: the card lacks this value.
    """
    if not value:
        raise OSError(errno.ENOENT, "no value")
    return value


SAMPLED_VALUES: Calls = {
    "util": lambda gpu: gpu.read_number("gpu_busy_percent"),
    "memory": lambda gpu: gpu.read_memory(),
    "temp": lambda gpu: gpu.read_degrees("core", "input"),
    "temp_max": lambda gpu: gpu.read_degrees("core", "crit"),
    "mem_temp": lambda gpu: gpu.read_degrees("mem", "input"),
    "mem_temp_max": lambda gpu: gpu.read_degrees("mem", "crit"),
    "power_w": lambda gpu: gpu.read_watts("power1_average", "power1_input"),
    "sm_clock": lambda gpu: gpu.read_sensor("freq1_input") // 1_000_000,
    "ras": lambda gpu: gpu.read_ras(),
}
"""How each value of a sample is read from the files of a GPU."""
SLEEPING_VALUES: Calls = {
    "name": lambda gpu: gpu.read_text("product_name"),
    "serial": lambda gpu: gpu.read_text("serial_number"),
    "vbios": lambda gpu: gpu.read_text("vbios_version"),
    "subsystem": lambda gpu: f"{gpu.read_number('subsystem_device'):04x}{gpu.read_number('subsystem_vendor'):04x}",
    "pcie_width": lambda gpu: gpu.read_link("width"),
    "pcie_width_max": lambda gpu: gpu.read_link("max_width"),
}
"""Values that can be read from a suspended GPU."""
ALL_VALUES: Calls = {
    **SAMPLED_VALUES,
    **SLEEPING_VALUES,
    "power_limit_w": lambda gpu: gpu.read_watts("power1_cap"),
    "power_default_w": lambda gpu: gpu.read_watts("power1_cap_default"),
    "bad_pages": lambda gpu: gpu.read_bad_pages(),
    "modes": lambda gpu: [gpu.read_text(f"current_{kind}_partition") for kind in ("compute", "memory")],
}
"""Values that are judged before a run."""


_KFD = "/dev/kfd"


def collect_amdgpu(root: str, wanted: bool) -> dict[str, Any]:
    """Return the group `amdgpu`.

    Raises:
        AbsentError: The request expects no GPU.
    """
    if not wanted:
        raise AbsentError("no GPU is declared")
    session = AmdgpuSession(root)
    readings = session.read_gpus()
    nodes = [_KFD, *(f"/dev/dri/renderD{gpu['render']}" for gpu in session.gpus)]
    return {
        "driver": kernel_files.read_text(root, "/sys/module/amdgpu/version"),
        "count": len(readings),
        "hidden": session.hidden,
        "dev": [{"path": path, "access": kernel_files.probe_device_access(root, path)} for path in nodes],
        "numa_balancing": kernel_files.read_int(root, "/proc/sys/kernel/numa_balancing"),
        "devices": [reading.to_facts() for reading in readings],
    }


class AmdgpuSession:
    """The GPUs of a machine, found once, for repeated readings. It offers the samplers the same as `NvmlSession`.

    Args:
        root: Prefix of /sys, /proc and /dev.
    """

    vendor = "amd"
    init_error: int | None = None

    def __init__(self, root: str) -> None:
        self._root = root
        self.gpus, self.hidden = gpu_devices.list_amd_gpus(root)
        self._contained = processes.has_own_pid_namespace(root)
        self._metrics: dict[int, FirmwareMetrics | None] = {}
        self._links: dict[int, int] = {}

    @property
    def indices(self) -> list[int]:
        """Return the indices of the GPUs."""
        return [gpu["index"] for gpu in self.gpus]

    def read_gpus(self) -> list[AmdgpuReading]:
        """Read every GPU."""
        by_node = {gpu["node"]: gpu["index"] for gpu in self.gpus}
        readings = [AmdgpuReading(self._root, gpu).read_all(self.list_gpu_processes(gpu)) for gpu in self.gpus]
        for reading, gpu in zip(readings, self.gpus):
            reading.values["xgmi"] = gpu_devices.list_xgmi_links(self._root, gpu, by_node)
        repeat_doubtful_readings(readings)
        return readings

    def read_samples(self) -> list[dict[str, Any]]:
        """Return the few values of a sample."""
        devices = []
        for gpu in self.gpus:
            reading = AmdgpuReading(self._root, gpu, self._metrics.get(gpu["index"])).read_sample_values()
            self._metrics[gpu["index"]] = reading.metrics
            self._links[gpu["index"]] = sum(reading.values.get("xgmi_links") or [])
            devices.append(reading.to_facts())
        return devices

    def count_links(self, index: int) -> int:
        """Return how many XGMI links of a GPU were up in the last sample."""
        if index not in self._links:
            self.read_samples()
        return self._links.get(index, 0)

    def list_holders(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return memory and processes of some GPUs; GPUs that do not answer are left out, as nothing can use them."""
        holding = []
        for gpu in self.gpus:
            if gpu["index"] in indices:
                memory = AmdgpuReading(self._root, gpu).read_memory()
                if memory is not None:
                    holding.append({"gpu": gpu["index"], **memory, "procs": self.list_gpu_processes(gpu)})
        return holding

    def list_gpu_processes(self, gpu: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the processes that hold memory of a GPU."""

        def describe(pid: int) -> dict[str, Any]:
            # The kernel uses the machine's pids; in a container such a number belongs to another process.
            return gpu_values.UNKNOWN_PROCESS if self._contained else gpu_values.describe_process(self._root, pid)

        return [
            {"pid": pid, "used": used, "kind": "compute", **describe(pid)}
            for pid, used in gpu_devices.list_gpu_memory_holders(self._root, gpu["gpu_id"]).items()
        ]


class AmdgpuReading(GpuReading):
    """A reading of one GPU.

    Args:
        root: Prefix of /sys.
        gpu: Its entry of `gpu_devices.list_amd_gpus`.
        before: The firmware's table of the reading before this one.

    Attributes:
        metrics: The firmware's table, or `None`.
    """

    def __init__(self, root: str, gpu: dict[str, Any], before: FirmwareMetrics | None = None) -> None:
        super().__init__("amd", gpu["index"], FILE_WORDS)
        self._gpu, self._files = gpu, GpuFiles(root, gpu["pci"])
        self.values = {name: gpu[name] for name in ("uuid", "pci") if gpu[name]}
        self.metrics = before
        self._counted = False

    def read_all(self, holders: list[dict[str, Any]]) -> AmdgpuReading:
        """Read all values that are judged before a run."""
        plate = {"minor": self._gpu["render"], "gfx": self._gpu["gfx"], "hive": self._gpu["hive"]}
        self.values.update(plate, partition=self._gpu["partition"], procs=holders)
        self._take(SLEEPING_VALUES if self._files.is_asleep() else ALL_VALUES)
        # Virtual functions and some cards have no name.
        if "name" not in self.values:
            self.codes.pop("name", None)
            self.values["name"] = f"AMD {self._gpu['gfx']} ({self._gpu['device']})"
        return self

    def read_sample_values(self) -> AmdgpuReading:
        """Read the few values of a sample."""
        self._take({} if self._files.is_asleep() else SAMPLED_VALUES)
        return self

    def read_memory(self) -> dict[str, int] | None:
        """Return used and total bytes, or `None` if the GPU does not answer."""
        self._read({"memory": SAMPLED_VALUES["memory"]})
        return self.values.get("memory")

    def is_doubtful(self) -> bool:  # type: ignore[explicit-override]  # the mark would have to be imported
        """Return whether to read again: a result may be chance, or slowdowns must be counted over time."""
        return super().is_doubtful() or (self._counted and "slowdown" not in self.values)

    def read_again(self, names: list[str]) -> None:  # type: ignore[explicit-override]
        """Read these values once more, and the firmware's table."""
        self._read({name: ALL_VALUES[name] for name in names if name in ALL_VALUES})
        self._read_firmware()

    def _take(self, calls: Calls) -> None:
        if self._files.is_gone():
            # Each further query of a missing device may take seconds.
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
                # The content is not in the documented format.
                self.codes[name] = errno.EBADMSG
        if "ras" in self.values and "ras" in calls:
            blocks = self.values["ras"].values()
            self.values.update(ecc_unc=sum(b[0] for b in blocks), ecc_cor=sum(b[1] for b in blocks))

    def _read_firmware(self) -> None:
        before = self.metrics
        try:
            self.metrics = FirmwareMetrics(kernel_files.read_bytes(f"{self._files.place}/gpu_metrics"))
        except OSError:
            # The GPU has no such table.
            return
        self._counted = self.metrics.counters is not None
        slowdown = name_slowdowns(before or self.metrics, self.metrics)
        if slowdown is not None and (before is not None or not self._counted):
            self.values["slowdown"] = slowdown
        if self.metrics.links is not None:
            self.values["xgmi_links"] = self.metrics.links
