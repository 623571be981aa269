"""Makers of GPUs: where the facts of theirs come from, and what a person does with them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """A maker of GPUs.

    Attributes:
        name: As people write it.
        group: The group of facts that tells of its GPUs; `None` for one whose GPUs are only recognised.
        source: What is asked, in words.
        codes: The error numbers beside the words of `err` are those of files (`errno`), not of a library.
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
"""By the key in facts; where a node has GPUs of several, those of the first are what a run is about."""

JUDGED = tuple(key for key, vendor in VENDORS.items() if vendor.group is not None)
"""Those whose GPUs are judged."""
