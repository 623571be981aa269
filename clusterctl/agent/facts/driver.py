"""GPUs, their driver and its device nodes as the kernel shows them, without asking the driver anything."""

from __future__ import annotations

import os
import re
import stat

from clusterctl.agent.facts import pci
from clusterctl.agent.linux import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import gpus as shapes

_VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x19e5": "ascend", "0x8086": "intel"}
"""PCI vendors of GPUs that are known here."""
_CLASSES = {
    "nvidia": ("0x0300", "0x0302"),
    "amd": ("0x0300", "0x0302", "0x0380", "0x1200"),
    "ascend": ("0x1200",),
    "intel": ("0x0300", "0x0380"),
}
"""PCI classes of each vendor's GPUs: display, 3D and other display controllers, processing accelerators."""
_BRIDGE_CLASS = "0x0680"
_BUS = "/sys/bus/pci/devices"
_BUILT_IN = "0000:00:"
"""Where graphics that are part of an Intel processor sit; nobody computes on them."""
_PROC = "/proc/driver/nvidia/gpus"
_HELPERS = ("/usr/bin/nvidia-modprobe", "/bin/nvidia-modprobe", "/usr/sbin/nvidia-modprobe")
_IMEX = "/dev/nvidia-caps-imex-channels"


def collect(root: str) -> shapes.Driver:
    """Return the group `driver`."""
    modules = [line.split()[0] for line in (paths.text(root, "/proc/modules") or "").splitlines() if line]
    gpus, switches = _pci(root)
    proc = paths.text(root, "/proc/driver/nvidia/version")
    match = re.search(r"Module\s+(\S+)\s", (proc or "") + " ")
    return {
        "module": paths.text(root, "/sys/module/nvidia/version") or (match.group(1) if match else None),
        "proc_version": proc.splitlines()[0] if proc else None,
        "nouveau": "nouveau" in modules,
        "modules": [name for name in modules if name.startswith(("nvidia", "amdgpu"))],
        "nvswitches": switches,
        "pci": gpus,
        "dev": [_node(root, f"/dev/{name}") for name in paths.names(root, "/dev") if _is_node(name)],
        "imex": [_node(root, f"{_IMEX}/{name}") for name in paths.names(root, _IMEX)],
        "helper": any(_is_setuid(paths.under(root, path)) for path in _HELPERS),
    }


def _pci(root: str) -> tuple[list[shapes.Gpu], int]:
    gpus: list[shapes.Gpu] = []
    switches = 0
    for address in paths.names(root, _BUS):
        vendor = _VENDORS.get(paths.text(root, f"{_BUS}/{address}/vendor") or "")
        if vendor is None or (vendor == "intel" and address.startswith(_BUILT_IN)):
            continue
        kind = (paths.text(root, f"{_BUS}/{address}/class") or "")[:6]
        switches += vendor == "nvidia" and kind == _BRIDGE_CLASS
        if kind in _CLASSES[vendor]:
            gpus.append({"address": address, "vendor": vendor, "class": kind, **_device(root, address)})
    return gpus, switches


def _device(root: str, address: str) -> shapes.Card:
    place = os.path.realpath(paths.under(root, f"{_BUS}/{address}"))
    return {"driver": _link_name(f"{place}/driver"), "minor": _minor(root, address), **pci.link(place)}


def _minor(root: str, address: str) -> int | None:
    """Return the number of a GPU's device node, as the driver tells it where it has taken the card."""
    for line in (paths.text(root, f"{_PROC}/{address}/information") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Device Minor" and value.strip().isdigit():
            return int(value)
    return None


def _link_name(path: str) -> str | None:
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def _is_node(name: str) -> bool:
    return re.fullmatch(r"nvidia(\d+|ctl|-uvm)", name) is not None


def _node(root: str, path: str) -> shapes.Node:
    """Tell whether this user may open a device node (nothing is opened: that would wake the driver)."""
    return {"path": path, "readable": os.access(paths.under(root, path), os.R_OK | os.W_OK)}


def _is_setuid(path: str) -> bool:
    try:
        mode = os.stat(path)
    except OSError:
        return False
    return mode.st_uid == 0 and bool(mode.st_mode & stat.S_ISUID)
