"""The meaning of errors that a GPU library returns, before a run and during it.

Facts carry an error word that is the same for every vendor (`err`) and the vendor's own code (`codes`).
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterctl.health.model import VENDORS, Action

UNSUPPORTED, DENIED, CORRUPTED, FAILED = "unsupported", "denied", "corrupted", "failed"
READINGS = 3
"""How many readings in a row must return a possibly transient error, each from the same call (NVSentinel#1668)."""


@dataclass(frozen=True, slots=True)
class ErrorMeaning:
    """The meaning of one error.

    Attributes:
        words: Text for a person.
        action: What to do about it.
        at_once: One such error is proof; others must come `READINGS` times in a row.
    """

    words: str
    action: Action
    at_once: bool


MEANINGS: dict[str, ErrorMeaning] = {
    "lost": ErrorMeaning("GPU is lost", Action.REBOOT_NODE, at_once=True),
    "reset-required": ErrorMeaning("GPU requires reset", Action.RESET_GPU, at_once=True),
    "resetting": ErrorMeaning("GPU is being reset", Action.RESET_GPU, at_once=False),
    "power": ErrorMeaning("insufficient power", Action.CHECK_POWER_COOLING, at_once=False),
    "timeout": ErrorMeaning("timed out", Action.REBOOT_NODE, at_once=False),
    "unknown": ErrorMeaning("unknown error", Action.REBOOT_NODE, at_once=False),
}
"""Errors that concern the GPU rather than the call, the worst first."""

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
"""Errors of reading a file of AMD's driver (the reasons are in `clusterctl.agent.facts.gpu_values`)."""

_MOST_NAMED = 3


def name_nvml_error(code: int) -> str:
    """Describe an NVML return code."""
    return NVML_NAMES.get(code, f"NVML error {code}")


def describe_missing_value(device: Mapping[str, Any], field: str) -> str:
    """Describe why a value of a GPU is missing."""
    code, word = (device.get("codes") or {}).get(field), (device.get("err") or {}).get(field)
    return str(word or "not read") if code is None else name_error_code(device, code)


def name_error_code(device: Mapping[str, Any], code: int) -> str:
    """Describe a vendor's error code."""
    vendor = VENDORS.get(str(device.get("vendor")))
    if vendor is None or vendor.codes == "nvml":
        return name_nvml_error(code)
    return _FILE_NAMES.get(code) or f"error {errno.errorcode.get(code, code)}"


def find_worst_error(errors: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Return the worst error of some calls and the calls that returned it; `None` if all concern the calls alone."""
    for word in MEANINGS:
        calls = [name for name, answer in errors.items() if answer == word]
        if calls:
            return word, calls
    return None


def format_calls(calls: Iterable[str]) -> str:
    """List the calls that returned an error; many calls become "all"."""
    names = list(calls)
    left = len(names) - _MOST_NAMED
    return f"{', '.join(names[:_MOST_NAMED])} and {left} more" if left > 1 else ", ".join(names)
