"""Which GPUs a machine has, without loading a driver library: from what the kernel shows."""

from __future__ import annotations

import os
import re

from clusterctl.agent.system import read_bytes

# Not from `typing`, whose import would be a good part of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DRIVER = "/proc/driver/nvidia/gpus"


def _information() -> list[dict[str, str]]:
    """Return what the driver says of each device, in the order of the PCI bus, which is the order of their indices."""
    try:
        slots = sorted(os.listdir(_DRIVER))
    except OSError:
        return []
    found = []
    for slot in slots:
        text = read_bytes(f"{_DRIVER}/{slot}/information").decode("utf-8", "replace")
        pairs = (line.partition(":") for line in text.splitlines())
        found.append({key.strip(): value.strip() for key, _, value in pairs})
    return found


def count() -> dict[str, Any]:
    """Return `{count, indices, source}` of the NVIDIA GPUs of this machine."""
    devices = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))
    known = len(_information())
    # A container sees all devices in /proc but only its own in /dev.
    number = min(known, devices) if known and devices else known or devices
    source = "proc" if known and number == known else "dev"
    return {"count": number, "indices": list(range(number)), "source": source if number else "none"}


def lock_names() -> dict[int, str]:
    """Return a name for each device that stays the same for every container of the machine, by index."""
    found = {}
    for index, device in enumerate(_information()):
        uuid = device.get("GPU UUID", "")
        if re.fullmatch(r"GPU-[0-9a-fA-F-]+", uuid):
            found[index] = uuid
    return found
