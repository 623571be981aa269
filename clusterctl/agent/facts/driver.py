"""NVIDIA's driver and devices as the kernel shows them, without asking the driver anything."""

from __future__ import annotations

import os
import re

from clusterctl.agent.facts import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_GPU_CLASSES = ("0x0300", "0x0302")
_BRIDGE_CLASS = "0x0680"


def collect(root: str) -> dict[str, Any]:
    """Return the group `driver`."""
    modules = [line.split()[0] for line in (paths.text(root, "/proc/modules") or "").splitlines() if line]
    gpus, switches = _pci(root)
    proc = paths.text(root, "/proc/driver/nvidia/version")
    found = re.search(r"Module\s+(\S+)\s", (proc or "") + " ")
    return {
        "module": paths.text(root, "/sys/module/nvidia/version") or (found.group(1) if found else None),
        "proc_version": proc.splitlines()[0] if proc else None,
        "nouveau": "nouveau" in modules,
        "modules": [name for name in modules if name.startswith("nvidia")],
        "nvswitches": switches,
        "pci": gpus,
        "dev": _nodes(root),
    }


def _pci(root: str) -> tuple[list[dict[str, Any]], int]:
    base, gpus, switches = "/sys/bus/pci/devices", [], 0
    for address in paths.names(root, base):
        if paths.text(root, f"{base}/{address}/vendor") != "0x10de":
            continue
        kind = (paths.text(root, f"{base}/{address}/class") or "")[:6]
        switches += kind == _BRIDGE_CLASS
        if kind in _GPU_CLASSES:
            width = paths.number(root, f"{base}/{address}/current_link_width")
            most = paths.number(root, f"{base}/{address}/max_link_width")
            gpus.append({"address": address, "width": width, "max_width": most})
    return gpus, switches


def _nodes(root: str) -> list[dict[str, Any]]:
    """Return the device nodes and whether this user may open them (nothing is opened: that would wake the driver)."""
    found = [name for name in paths.names(root, "/dev") if re.fullmatch(r"nvidia(\d+|ctl)", name)]
    return [
        {"path": f"/dev/{name}", "readable": os.access(paths.under(root, f"/dev/{name}"), os.R_OK | os.W_OK)}
        for name in found
    ]
