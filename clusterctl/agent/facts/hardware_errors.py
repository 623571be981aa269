"""Hardware error counters since boot that every user may read: PCIe links and main memory.

PCIe: the counters of Advanced Error Reporting (kernel 4.19, `sysfs-bus-pci-devices-aer_stats`) at GPUs and network
cards, at the port above each, and at its root port. Memory: the counters of EDAC (`sysfs-devices-edac`).
"""

from __future__ import annotations

import os

from clusterctl.agent.facts import driver
from clusterctl.agent.linux import sysfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_DRIVERS = ("nvidia", "amdgpu")
_CARDS = ("/sys/class/infiniband", "/sys/class/net")
_MEMORY = "/sys/devices/system/edac/mc"


def collect_hardware_errors(root: str) -> dict[str, Any]:
    """Return the group `hardware`."""
    cards = [*_gpus(root), *_network(root)]
    places: dict[str, str] = {}
    for place, what in cards:
        for port in _port_path(place):
            places.setdefault(port, what if port == place else f"above {what}")
    devices: list[dict[str, Any]] = [
        {"address": os.path.basename(place), "of": what, **errors}
        for place, what in places.items()
        if (errors := _errors(place)) is not None
    ]
    return {"pcie": devices, "memory": _memory(root)}


def _gpus(root: str) -> list[tuple[str, str]]:
    bases = [f"/sys/bus/pci/drivers/{driver}" for driver in _DRIVERS]
    cards = [(base, name) for base in bases for name in sysfs.list_names(root, base) if driver.is_pci_device(name)]
    return [(os.path.realpath(sysfs.join_root(root, f"{base}/{name}")), f"GPU {name}") for base, name in cards]


def _network(root: str) -> list[tuple[str, str]]:
    versions: dict[str, str] = {}
    for base in _CARDS:
        for name in sysfs.list_names(root, base):
            place = os.path.realpath(sysfs.join_root(root, f"{base}/{name}/device"))
            if driver.is_pci_device(place):
                versions.setdefault(place, name)
    return list(versions.items())


def _port_path(place: str) -> list[str]:
    """Return the paths of a card, of the port above it, and of its root port."""
    way = [place]
    while driver.is_pci_device(above := os.path.dirname(way[-1])):
        way.append(above)
    return [*way[:2], *way[2:][-1:]]


def _errors(place: str) -> dict[str, Any] | None:
    """Return `{correctable, nonfatal, fatal}`, the counts by kind of error; `None` if nothing counts them."""
    texts = {grade: sysfs.read_text("/", f"{place}/aer_dev_{grade}") for grade in ("correctable", "nonfatal", "fatal")}
    if all(text is None for text in texts.values()):
        return None
    correctable, nonfatal, fatal = (_kinds(text or "") for text in texts.values())
    return {"correctable": correctable, "nonfatal": nonfatal, "fatal": fatal}


def _kinds(text: str) -> dict[str, int]:
    counts = {}
    for line in text.splitlines():
        name, _, count = line.rpartition(" ")
        if count.isdigit() and int(count) and not name.startswith("TOTAL_"):
            counts[name.strip()] = int(count)
    return counts


def _memory(root: str) -> list[dict[str, Any]]:
    return [
        {
            "controller": name,
            "corrected": sysfs.read_int(root, f"{_MEMORY}/{name}/ce_count"),
            "uncorrected": sysfs.read_int(root, f"{_MEMORY}/{name}/ue_count"),
            "seconds": sysfs.read_int(root, f"{_MEMORY}/{name}/seconds_since_reset"),
        }
        for name in sysfs.list_names(root, _MEMORY)
        if name.startswith("mc")
    ]
