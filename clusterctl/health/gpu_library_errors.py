"""The meaning of errors that a GPU library returns.

Facts contain a word for each error, the same for every vendor (`err`), and the error code of the vendor (`codes`).
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterctl.health.findings import VENDORS, Action

UNSUPPORTED, DENIED, CORRUPTED, FAILED = "unsupported", "denied", "corrupted", "failed"
READINGS = 3
"""A possibly transient error counts as a fault once a call has returned it in this number of readings in a row
(NVSentinel#1668)."""


@dataclass(frozen=True, slots=True)
class ErrorMeaning:
    """What an error of a GPU means, and how to repair the GPU.

    Attributes:
        description: The error in words.
        action: The repair.
        is_conclusive: A single such error proves a fault. Other errors must occur `READINGS` times in a row.
    """

    description: str
    action: Action
    is_conclusive: bool


ERROR_MEANINGS: dict[str, ErrorMeaning] = {
    "lost": ErrorMeaning("GPU is lost", Action.REBOOT_NODE, is_conclusive=True),
    "reset-required": ErrorMeaning("GPU requires reset", Action.RESET_GPU, is_conclusive=True),
    "resetting": ErrorMeaning("GPU is being reset", Action.RESET_GPU, is_conclusive=False),
    "power": ErrorMeaning("insufficient power", Action.CHECK_POWER_COOLING, is_conclusive=False),
    "timeout": ErrorMeaning("timed out", Action.REBOOT_NODE, is_conclusive=False),
    "unknown": ErrorMeaning("unknown error", Action.REBOOT_NODE, is_conclusive=False),
}
"""Word of an error to its meaning, for errors of the GPU itself, not of one call. The worst error is first."""

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

_ERRNO_NAMES = {
    errno.EPERM: "GPU is being reset",
    errno.EBUSY: "GPU is being reset",
    errno.ENODEV: "GPU is lost",
    errno.ENXIO: "GPU is lost",
    errno.EIO: "GPU is lost",
    errno.ETIME: "timed out",
    errno.ETIMEDOUT: "timed out",
    errno.EACCES: "no permission",
    errno.EBADMSG: "content that the driver does not document",
}
"""Meaning of errors when the agent reads a file of AMD's driver (`clusterctl.agent.facts.gpu_reading_base`)."""

_MAX_NAMED = 3


def describe_nvml_error(code: int) -> str:
    """Return the meaning of a return code of NVML."""
    return NVML_NAMES.get(code, f"NVML error {code}")


def describe_missing_value(device: Mapping[str, Any], field: str) -> str:
    """Return why a value of a GPU is missing."""
    code, word = (device.get("codes") or {}).get(field), (device.get("err") or {}).get(field)
    return str(word or "not read") if code is None else describe_error_code(device, code)


def describe_error_code(device: Mapping[str, Any], code: int) -> str:
    """Return the meaning of an error code in the facts of a GPU."""
    vendor = VENDORS.get(str(device.get("vendor")))
    if vendor is None or vendor.error_codes == "nvml":
        return describe_nvml_error(code)
    return _ERRNO_NAMES.get(code) or f"error {errno.errorcode.get(code, code)}"


def find_worst_error(errors: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Return the worst error of a GPU and the calls that returned it; `None` if no error is an error of the GPU itself.

    Args:
        errors: Name of each call to the word of its error.
    """
    for word in ERROR_MEANINGS:
        calls = [name for name, answer in errors.items() if answer == word]
        if calls:
            return word, calls
    return None


def format_failed_calls(calls: Iterable[str]) -> str:
    """Return the names of some calls for a message, at most three."""
    names = list(calls)
    left = len(names) - _MAX_NAMED
    return f"{', '.join(names[:_MAX_NAMED])} and {left} more" if left > 1 else ", ".join(names)
