"""Which GPUs a machine has, without loading a driver library: from what the kernel shows."""

from __future__ import annotations

import os

from clusterctl.agent.linux.syscalls import read_bytes

# Not from `typing`, whose import would be a good part of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.types.machine import Gpus

_DRIVER = "/proc/driver/nvidia/gpus"
_UUID = frozenset("0123456789abcdefABCDEF-")
_KFD = "/sys/class/kfd/kfd/topology/nodes"


def _information(root: str) -> list[dict[str, str]]:
    """Return what the driver says of each device, in the order of the PCI bus, which is the order of their indices."""
    base = root + _DRIVER
    try:
        slots = sorted(os.listdir(base))
    except OSError:
        return []
    paths = []
    for slot in slots:
        text = read_bytes(f"{base}/{slot}/information").decode("utf-8", "replace")
        pairs = (line.partition(":") for line in text.splitlines())
        paths.append({key.strip(): value.strip() for key, _, value in pairs})
    return paths


def _of_amd(root: str) -> list[dict[str, Any]]:
    """Return AMD's GPUs as the kernel's compute driver has them, in the order in which HIP counts them."""
    if not os.path.isdir(root + _KFD):
        return []
    from clusterctl.agent.linux import kfd

    return kfd.gpus(root or "/")[0]


def count(root: str = "") -> Gpus:
    """Return `{count, indices, source, vendor}` of the GPUs of this machine: NVIDIA's, else AMD's.

    Args:
        root: Prefix of /dev, /proc and /sys.
    """
    names = os.listdir(f"{root}/dev")
    devices = sum(name.startswith("nvidia") and name[len("nvidia") :].isdecimal() for name in names)
    listed = len(_information(root))
    # A container sees all devices in /proc but only its own in /dev.
    number = min(listed, devices) if listed and devices else listed or devices
    if number:
        source = "proc" if number == listed else "dev"
        return {"count": number, "indices": list(range(number)), "source": source, "vendor": "nvidia"}
    others = [gpu["index"] for gpu in _of_amd(root)]
    source, vendor = ("kfd", "amd") if others else ("none", None)
    return {"count": len(others), "indices": others, "source": source, "vendor": vendor}


def lock_names(root: str = "") -> dict[int, str]:
    """Return a name for each device that stays the same for every container of the machine, by index."""
    names = {}
    for index, device in enumerate(_information(root)):
        uuid = device.get("GPU UUID", "")
        digits = uuid.removeprefix("GPU-")
        if digits != uuid and digits and not set(digits) - _UUID:
            names[index] = uuid
    if names:
        return names
    # Not every AMD GPU has a number of its own; its place in the machine is as good.
    return {gpu["index"]: gpu["uuid"] or f"pci-{gpu['pci']}-{gpu['partition']}" for gpu in _of_amd(root)}


def lock_places(root: str = "") -> dict[int, str]:
    """Return by index a folder of the kernel's for each device; it is root's: nobody else can make or remove it.

    Where containers are given single GPUs, NVIDIA's folder of a device is mounted into them: it is one for all.
    """
    base = root + _DRIVER
    listed = len(_information(root))
    if listed:
        return dict(enumerate(f"{base}/{slot}" for slot in sorted(os.listdir(base))[:listed]))
    return {gpu["index"]: f"{root}{_KFD}/{gpu['node']}" for gpu in _of_amd(root)}
