"""The PCIe link of a card: how many lanes it has, could have, and is given by the port above it."""

from __future__ import annotations

import os
import re

from clusterctl.agent.linux import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import gpus as shapes

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_EMULATED = "0x1b36"
"""The PCI vendor of QEMU: the width of a port that it makes up says nothing about a slot."""
_INSIDE = "0x1002"
"""The PCI vendor of the bridges that are part of an AMD card: the link of the card is that of the outermost of them
(`amdgpu_device_partner_bandwidth` of the kernel's amdgpu passes them over too)."""


def link(place: str) -> shapes.Link:
    """Return `{width, max_width, slot_width}` of the card at a real path of sysfs, each `None` where it is not shown.

    The width of the slot is not known in most virtual machines.
    """
    while (above := os.path.dirname(place)) and is_device(above) and _vendor(above) == _INSIDE:
        place = above
    return {
        "width": paths.number("/", f"{place}/current_link_width"),
        "max_width": paths.number("/", f"{place}/max_link_width"),
        "slot_width": _slot_width(above),
    }


def _slot_width(port: str) -> int | None:
    if not is_device(port) or _vendor(port) == _EMULATED:
        return None
    return paths.number("/", f"{port}/max_link_width") or None


def is_device(place: str) -> bool:
    """Tell whether a path of sysfs is that of a card or a port."""
    return _ADDRESS.fullmatch(os.path.basename(place)) is not None


def _vendor(place: str) -> str | None:
    return paths.text("/", f"{place}/vendor")
