"""What it means that a GPU's library answers with an error: the same before a run and during it.

Facts carry words that hold for every vendor (`err`) and the vendor's own number beside them (`codes`).
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.health.model import Action
from clusterctl.health.vendors import VENDORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

UNSUPPORTED, DENIED, CORRUPTED, FAILED = "unsupported", "denied", "corrupted", "failed"
READINGS = 3
"""How many looks in a row an answer needs that may be chance, each by the same call (NVSentinel#1668)."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an answer says of the GPU.

    Attributes:
        words: For a person.
        action: What to do about it.
        at_once: One such answer is proof; others have to come `LOOKS` times in a row.
    """

    words: str
    action: Action
    at_once: bool


MEANINGS: dict[str, Meaning] = {
    "lost": Meaning("GPU is lost", Action.REBOOT_NODE, at_once=True),
    "reset-required": Meaning("GPU requires reset", Action.RESET_GPU, at_once=True),
    "resetting": Meaning("GPU is being reset", Action.RESET_GPU, at_once=False),
    "power": Meaning("insufficient power", Action.CHECK_POWER_COOLING, at_once=False),
    "timeout": Meaning("timed out", Action.REBOOT_NODE, at_once=False),
    "unknown": Meaning("unknown error", Action.REBOOT_NODE, at_once=False),
}
"""Answers that speak of the GPU and not of the call, the gravest first."""

NVML_NAMES: dict[int, str] = {
    1: "not initialised",
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    8: "insufficient power",
    9: "driver not loaded",
    10: "timed out",
    11: "interrupt problem",
    12: "library not found",
    13: "function not in this driver",
    14: "corrupted infoROM",
    15: "GPU is lost",
    16: "GPU requires reset",
    17: "operating system blocked the request",
    18: "driver/library version mismatch",
    19: "in use",
    20: "insufficient memory",
    25: "version not in this driver",
    28: "GPU not found",
    29: "invalid state",
    999: "unknown error",
}
"""Return codes of NVIDIA's `nvml.h`."""

_FILE_NAMES = {
    errno.EPERM: "GPU is being reset",
    errno.EBUSY: "GPU is being reset",
    errno.ENODEV: "GPU is lost",
    errno.ENXIO: "GPU is lost",
    errno.EIO: "GPU is lost",
    errno.ETIME: "timed out",
    errno.ETIMEDOUT: "timed out",
    errno.EACCES: "no permission",
    errno.EBADMSG: "not what the driver documents",
}
"""Numbers with which reading a file of AMD's driver ends (`clusterctl.agent.facts.answers` says why)."""

_MOST_NAMED = 3


def nvml_name(code: int) -> str:
    """Say an NVML return code in words."""
    return NVML_NAMES.get(code, f"NVML error {code}")


def describe_missing_value(device: Mapping[str, Any], field: str) -> str:
    """Say why a value of a GPU is missing."""
    code, word = (device.get("codes") or {}).get(field), (device.get("err") or {}).get(field)
    return str(word or "not read") if code is None else code_name(device, code)


def code_name(device: Mapping[str, Any], code: int) -> str:
    """Say in words a number that the GPU's vendor gave in place of a value."""
    vendor = VENDORS.get(str(device.get("vendor")))
    if vendor is None or vendor.codes == "nvml":
        return nvml_name(code)
    return _FILE_NAMES.get(code) or f"error {errno.errorcode.get(code, code)}"


def find_worst(errors: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Return the gravest answer of some calls, and which of them got it; `None` where all speak of calls alone."""
    for word in MEANINGS:
        calls = [name for name, answer in errors.items() if answer == word]
        if calls:
            return word, calls
    return None


def join_calls(calls: Iterable[str]) -> str:
    """Name the calls that got an answer; many are as good as all."""
    names = list(calls)
    left = len(names) - _MOST_NAMED
    return f"{', '.join(names[:_MOST_NAMED])} and {left} more" if left > 1 else ", ".join(names)
