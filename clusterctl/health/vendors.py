"""GPU vendors and the sources of their facts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """A GPU vendor.

    Attributes:
        name: The usual spelling.
        group: The group of facts about its GPUs; `None` if its GPUs are only recognised.
        source: Name of the source, for messages.
        codes: The codes beside `err` are file errors (`errno`), not library errors.
    """

    name: str
    group: str | None = None
    source: str = ""
    codes: str = ""


NVIDIA, AMD = "nvidia", "amd"
VENDORS: dict[str, Vendor] = {
    NVIDIA: Vendor(name="NVIDIA", group="nvml", source="NVML", codes="nvml"),
    AMD: Vendor(name="AMD", group="amdgpu", source="the amdgpu driver", codes="errno"),
    "ascend": Vendor(name="Huawei Ascend"),
    "intel": Vendor(name="Intel"),
}
"""Vendors by their key in facts. If a node has GPUs of several, the first vendor counts."""

JUDGED = tuple(key for key, vendor in VENDORS.items() if vendor.group is not None)
"""Vendors whose GPUs are judged."""
