"""Lines of the kernel's amdgpu driver that speak of a GPU in trouble.

    ras     errors that its memory or engines could not correct; grade: the block
    reset   grade: `begin`, `done` or `failed`
    hang    a queue of work did not end; what the driver got going again without a reset is none
    lost    it is no longer on the bus
    worn    more memory pages are bad than the driver accepts
    init    the driver could not start it

Words are those of `amdgpu_ras.c`, `amdgpu_device.c`, `amdgpu_job.c` and `amdgpu_ras_eeprom.c`.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    Event = Optional["tuple[str, str, str, str]"]

_DEVICE = re.compile(r"amdgpu ([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]): (?:amdgpu: )?")
_RAS = re.compile(r"\b(\d+) (?:new )?uncorrectable hardware errors detected in (?:total in )?(\w+) block")
"""With a number before it: the driver says `no uncorrectable hardware errors` of a GPU that is well."""
BOGUS = 1048560
"""A memory controller that sleeps reads as all ones, which the driver takes for so many errors at each query, and
multiples of it (rocm-smi on GPUs in runtime power management)."""
_HANG = re.compile(r"\bring \S+ timeout(?!, but soft recovered)")
_OTHERS = (
    ("reset", "failed", re.compile(r"GPU reset(?:\(\d+\))? failed|GPU reset end with ret|GPU Recovery Failed")),
    ("reset", "done", re.compile(r"GPU reset\(\d+\) succeeded")),
    ("reset", "begin", re.compile(r"GPU reset begin")),
    ("lost", "", re.compile(r"device lost from bus")),
    ("worn", "", re.compile(r"Saved bad pages \d+ reaches threshold")),
    ("init", "", re.compile(r"Fatal error during GPU init")),
)


def read(text: str) -> Event:
    """Return `(kind, PCI address or "", grade, detail)` of a line; `None` for one that tells of no trouble."""
    device = _DEVICE.search(text)
    address, detail = (device.group(1), text[device.end() :]) if device else ("", text)
    if ras := _RAS.search(detail):
        return ("ras", address, ras.group(2), detail) if int(ras.group(1)) % BOGUS else None
    if _HANG.search(detail):
        return "hang", address, "", detail
    for kind, grade, pattern in _OTHERS:
        if pattern.search(detail):
            return kind, address, grade, detail
    return None
