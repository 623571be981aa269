"""Which values are read of an AMD GPU, and from which files of its driver.

Names and units are those of the kernel's amdgpu: `amdgpu_pm.c`, `amdgpu_ras.c`, `amdgpu_fru_eeprom.c`.
"""

from __future__ import annotations

import errno
import os

from clusterctl.agent.facts import pci
from clusterctl.agent.facts.amdgpu_events import BOGUS
from clusterctl.agent.linux import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    Calls = dict[str, Callable[[], Any]]

_GONE = b"\xff\xff"
"""What the configuration space of a device reads as that has fallen off the bus."""


class Files:
    """The files of one GPU.

    Args:
        root: Prefix of /sys.
        address: Its PCI address.
    """

    def __init__(self, root: str, address: str) -> None:
        self.place = paths.under(root, f"/sys/bus/pci/devices/{address}")
        names = _names(f"{self.place}/hwmon")
        self._hwmon = f"{self.place}/hwmon/{names[0]}" if names else None
        self._sensors = self._labels()

    def asleep(self) -> bool:
        """Tell whether the GPU is suspended: to look at it would wake it up, or read nonsense."""
        return paths.content(f"{self.place}/power/runtime_status") == b"suspended\n"

    def gone(self) -> bool:
        """Tell whether the device answers no more on the bus."""
        try:
            with open(f"{self.place}/config", "rb", buffering=0) as file:
                return file.read(2) == _GONE
        except OSError:
            return False

    def metrics(self) -> bytes:
        """Return the firmware's own table.

        Raises:
            OSError: There is none.
        """
        return paths.read(f"{self.place}/gpu_metrics")

    def sampled(self) -> Calls:
        """Return the calls for the few values that a running job is watched by."""
        return {
            "util": lambda: self._number("gpu_busy_percent"),
            "memory": self._memory,
            "temp": lambda: self._degrees(self._core(), "input"),
            "temp_max": lambda: self._degrees(self._core(), "crit"),
            "mem_temp": lambda: self._degrees("mem", "input"),
            "mem_temp_max": lambda: self._degrees("mem", "crit"),
            "power_w": self._power,
            "sm_clock": lambda: self._sensor("freq1_input") // 1_000_000,
            "ras": self._ras,
        }

    def all_values(self) -> Calls:
        """Return the calls for everything that is judged before a run."""
        return {
            **self.sampled(),
            **self.lasting(),
            "power_limit_w": lambda: _watts(self._sensor("power1_cap")),
            "power_default_w": lambda: _watts(self._sensor("power1_cap_default")),
            "bad_pages": self._bad_pages,
            "modes": lambda: [self._text(f"current_{kind}_partition") for kind in ("compute", "memory")],
        }

    def lasting(self) -> Calls:
        """Return the calls for what may be read of a GPU that sleeps."""
        link = pci.link(os.path.realpath(self.place))
        return {
            "name": lambda: self._text("product_name"),
            "serial": lambda: self._text("serial_number"),
            "vbios": lambda: self._text("vbios_version"),
            "subsystem": lambda: f"{self._number('subsystem_device'):04x}{self._number('subsystem_vendor'):04x}",
            "pcie_width": lambda: _known(link["width"]),
            "pcie_width_max": lambda: _known(link["max_width"]),
        }

    def _text(self, name: str) -> str:
        text: str = _known(paths.read(f"{self.place}/{name}").decode("utf-8", "replace").strip())
        return text

    def _number(self, name: str) -> int:
        return int(self._text(name), 0)

    def _memory(self) -> dict[str, int]:
        used, total = self._number("mem_info_vram_used"), self._number("mem_info_vram_total")
        # As NVML's first version: what the driver keeps for itself counts as used.
        return {"used": used, "total": total, "version": 1}

    # --- sensors

    def _labels(self) -> dict[str, str]:
        """Return what each temperature is of, to the beginning of its files' names."""
        labels = {}
        for name in _names(self._hwmon) if self._hwmon else []:
            if name.startswith("temp") and name.endswith("_label"):
                label = (paths.content(f"{self._hwmon}/{name}") or b"").decode().strip()
                labels[label] = name[: -len("_label")]
        return labels

    def _core(self) -> str:
        """Return the hottest place of the chip that there is a sensor for."""
        return "junction" if "junction" in self._sensors else "edge"

    def _sensor(self, name: str) -> int:
        if self._hwmon is None:
            raise OSError(errno.ENOENT, "no sensors")
        return int(paths.read(f"{self._hwmon}/{name}"))

    def _degrees(self, label: str, what: str) -> float:
        return self._sensor(f"{self._sensors.get(label, label)}_{what}") / 1000

    def _power(self) -> float:
        try:
            return _watts(self._sensor("power1_average"))
        except FileNotFoundError:
            return _watts(self._sensor("power1_input"))

    # --- errors of memory and engines

    def _ras(self) -> dict[str, list[int]]:
        """Return errors since the driver was loaded: `[uncorrectable, correctable]` of each block that counts."""
        names = [name for name in _names(f"{self.place}/ras") if name.endswith("_err_count") or name.startswith("aca_")]
        texts = {name: paths.read(f"{self.place}/ras/{name}").decode() for name in names}
        counts = {name.replace("_err_count", "").replace("aca_", ""): _counts(text) for name, text in texts.items()}
        counted: dict[str, list[int]] = _known({block: pair for block, pair in counts.items() if pair is not None})
        return counted

    def _bad_pages(self) -> dict[str, int]:
        """Return pages of memory: out of use, about to be, and those that could not be taken out of use."""
        lines = paths.read(f"{self.place}/ras/gpu_vram_bad_pages").decode().splitlines()
        flags = [line.rpartition(":")[2].strip() for line in lines]
        return {name: flags.count(flag) for flag, name in (("R", "retired"), ("P", "pending"), ("F", "failed"))}


def _counts(text: str) -> list[int] | None:
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    numbers = {name.strip(): int(value) for name, value in pairs if value.strip().isdigit()}
    if "ue" not in numbers:
        return None
    return [0 if count % BOGUS == 0 else count for count in (numbers["ue"], numbers.get("ce", 0))]


def _watts(microwatts: int) -> float:
    """Return watts; of two dies on one card the second tells none, or nought."""
    return round(int(_known(microwatts)) / 1e6, 1)


def _known(value: Any) -> Any:
    """Return a value that says something.

    Raises:
        OSError: It is empty or nought: the card has no such thing.
    """
    if not value:
        raise OSError(errno.ENOENT, "nothing told")
    return value


def _names(place: str | None) -> list[str]:
    return paths.names("/", place) if place else []
