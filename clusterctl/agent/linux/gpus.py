"""Which GPUs a machine has, without loading a driver library: from what the kernel shows."""

from __future__ import annotations

import os

from clusterctl.agent.linux import paths

# Not from `typing`, whose import would be a good part of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.command_types import GpuCount

_DRIVER = "/proc/driver/nvidia/gpus"
_KFD = "/sys/class/kfd/kfd/topology/nodes"


def _slots(root: str) -> list[str]:
    """Return where the driver has devices on the PCI bus, in its order, which is the order of their indices."""
    return paths.names(root, _DRIVER)


def _minors(root: str) -> list[int]:
    """Return the numbers of NVIDIA's device files."""
    names = (name[len("nvidia") :] for name in paths.names(root, "/dev") if name.startswith("nvidia"))
    return [int(number) for number in names if number.isascii() and number.isdecimal()]


def _given(root: str, minors: list[int]) -> list[str]:
    """Return the slots of those devices whose files are here: a container may see the slots of all."""
    slots = _slots(root)
    given = [slot for slot in slots if _minor(root, slot) in minors]
    return given or slots


def _minor(root: str, slot: str) -> int | None:
    """Return the number of a device's file, as the driver tells it."""
    text = paths.text(root, f"{_DRIVER}/{slot}/information") or ""
    pairs = (line.partition(":") for line in text.splitlines())
    number = next((value.strip() for key, _, value in pairs if key.strip() == "Device Minor"), "")
    return int(number) if number.isascii() and number.isdecimal() else None


def _of_amd(root: str) -> list[dict[str, Any]]:
    """Return AMD's GPUs as the kernel's compute driver has them, in the order in which HIP counts them."""
    if not os.path.isdir(root + _KFD):
        return []
    from clusterctl.agent.linux import kfd

    return kfd.gpus(root or "/")[0]


def count(root: str = "") -> GpuCount:
    """Return `{count, indices, source, vendor}` of the GPUs of this machine: NVIDIA's, else AMD's.

    Args:
        root: Prefix of /dev, /proc and /sys.
    """
    devices, listed = len(_minors(root)), len(_slots(root))
    # A container sees all devices in /proc but only its own in /dev.
    number = min(listed, devices) if listed and devices else listed or devices
    if number:
        source = "proc" if number == listed else "dev"
        return {"count": number, "indices": list(range(number)), "source": source, "vendor": "nvidia"}
    others = [gpu["index"] for gpu in _of_amd(root)]
    source, vendor = ("kfd", "amd") if others else ("none", None)
    return {"count": len(others), "indices": others, "source": source, "vendor": vendor}


def lock_names(root: str = "") -> dict[int, str]:
    """Return by index where each device is in the machine: every container and namespace sees it there.

    Its number (UUID) would not do: NVIDIA's driver tells it only once the device was used.
    """
    minors = sorted(_minors(root))
    names = [f"pci-{slot}" for slot in _given(root, minors)] or [f"nvidia{minor}" for minor in minors]
    return dict(enumerate(names)) or {gpu["index"]: f"pci-{gpu['pci']}-{gpu['partition']}" for gpu in _of_amd(root)}
