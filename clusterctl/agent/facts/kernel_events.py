"""Errors of GPUs in the kernel log, counted: one entry for each kind of error at each device, whatever else is logged.

A driver whose GPU has died writes thousands of lines about it. What is counted as it is read cannot be pushed out.

    {"vendor": "nvidia", "kind": "xid" | "sxid", "device": PCI address, "code", "grade": "fatal" | "nonfatal" | "",
     "count", "first_age_s", "last_age_s", "ages": the newest, "order": place of its last line, "text": of that line}
    the same with "vendor": "amd", "kind": one of `amdgpu_events`, "code": 0, "grade": what makes the kind finer
"""

from __future__ import annotations

import re

from clusterctl.agent.facts import amdgpu_events

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Key = tuple[str, str, int, str]

_PCI = r"(?:PCI:)?([0-9a-fA-F:.]+)"
_XID = re.compile(rf"NVRM: Xid \({_PCI}(?: GPU-I:\d+)?(?: GPU-CI:\d+)?\)[^:]*: (\d+),\s*(.*)")
"""With MIG the instance stands behind the address: `kernel_rc.c` of NVIDIA's open-gpu-kernel-modules."""
_OFF_BUS = re.compile(r"NVRM: GPU ([0-9a-fA-F:.]+): GPU has fallen off the bus")
_OFF_BUS_BEGINS = re.compile(r"NVRM: The NVIDIA GPU ([0-9a-fA-F:.]+)")
_OFF_BUS_ENDS = "fallen off the bus and is not responding"
_SXID = re.compile(r"nvidia-nvswitch\d*.*?: SXid \(PCI:([^)]+)\): (\d+),\s*(?:(Fatal|Non-fatal)\s*,)?\s*(.*)")
_GRADE = re.compile(r"\b(non-?)?fatal\b", re.IGNORECASE)
_OFF_BUS_CODE = 79
_OFF_BUS_LINES = 3
"""Within how many lines the driver's report of a dead GPU, told line by line, comes to the point."""
_GRADED = range(144, 151)
"""NVLink 5: the line says whether it is fatal (NVIDIA, XID catalogue)."""
_AGES = 5
_TEXT = 200
_MOST = 512
"""Entries kept. There are fewer codes; a log that is no log must not fill our memory."""


class KernelEvents:
    """Takes in the lines of a kernel log, from the oldest on."""

    def __init__(self) -> None:
        self._entries: dict[Key, dict[str, Any]] = {}
        self._lines = 0
        self._dying: tuple[str, int] | None = None

    def take(self, text: str, age: float | None) -> bool:
        """Count the line where it is such an error; tell whether it was."""
        self._lines += 1
        if "NVRM" in text:
            return self._take_xid(text, age)
        if "amdgpu" in text:
            return self._take_amdgpu(text, age)
        match = _SXID.search(text) if "SXid" in text else None
        if match is None:
            return False
        device, code, word, detail = match.groups()
        grade = "" if word is None else "fatal" if word == "Fatal" else "nonfatal"
        self._count(("sxid", device.lower(), int(code), grade), detail, age)
        return True

    def counted(self) -> list[dict[str, Any]]:
        """Return the entries, in the order of their last lines."""
        return sorted(self._entries.values(), key=lambda entry: int(entry["order"]))

    def _take_xid(self, text: str, age: float | None) -> bool:
        if match := _XID.search(text):
            device, code, detail = match.group(1).lower(), int(match.group(2)), match.group(3)
            self._count(("xid", device, code, _grade(detail) if code in _GRADED else ""), detail, age)
            return True
        device = self._off_the_bus(text)
        if device is not None:
            # The driver says it once with a number and once without: one event.
            counted = _bus(device) in [_bus(key[1]) for key in self._entries if key[2] == _OFF_BUS_CODE]
            if not counted:
                self._count(("xid", device, _OFF_BUS_CODE, ""), "GPU has fallen off the bus", age)
        return device is not None

    def _take_amdgpu(self, text: str, age: float | None) -> bool:
        event = amdgpu_events.read(text)
        if event is None:
            return False
        kind, device, grade, detail = event
        self._count((kind, device, 0, grade), detail, age, "amd")
        return True

    def _off_the_bus(self, text: str) -> str | None:
        """Return the address of a GPU that this line, maybe with those before it, calls gone."""
        if match := _OFF_BUS.search(text):
            return match.group(1).lower()
        if match := _OFF_BUS_BEGINS.search(text):
            self._dying = (match.group(1).lower(), self._lines)
        if _OFF_BUS_ENDS in text and self._dying is not None:
            device, line = self._dying
            self._dying = None
            return device if self._lines - line <= _OFF_BUS_LINES else None
        return None

    def _count(self, key: Key, text: str, age: float | None, vendor: str = "nvidia") -> None:
        kind, device, code, grade = key
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= _MOST:
                return
            entry = {"vendor": vendor, "kind": kind, "device": device, "code": code, "grade": grade, "count": 0}
            entry.update({"first_age_s": age, "ages": []})
            self._entries[key] = entry
        entry["count"] += 1
        entry.update({"last_age_s": age, "order": self._lines, "text": text[:_TEXT]})
        if age is not None:
            entry["ages"] = [*entry["ages"], age][-_AGES:]


def _grade(text: str) -> str:
    match = _GRADE.search(text)
    return "" if match is None else "nonfatal" if match.group(1) else "fatal"


def _bus(address: str) -> str:
    """Return an address without the function, which not every line has."""
    return address.split(".", maxsplit=1)[0]
