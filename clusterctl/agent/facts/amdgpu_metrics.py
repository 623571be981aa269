"""What AMD's firmware says in the file `gpu_metrics`: what holds the clocks down, and which XGMI links are up.

Layouts are those of `kgd_pp_interface.h` of the kernel's amdgpu, each told by the revision in the file's first bytes;
all bits set mean that a value is not there.
"""

from __future__ import annotations

import struct

_THERMAL_BITS = 0xFFFF << 32
"""The bits of `indep_throttle_status` that are temperatures, and the signal of an overheated regulator or board."""
_COUNTERS = ("PROCHOT", "socket temperature", "regulator temperature", "memory temperature")
"""What is counted, for how long each held the clocks down; the power limit, normal under load, is left out."""
_RESIDENCIES = {(1, 6): 36, (1, 7): 44, (1, 8): 44}
"""Where the counters begin: of PROCHOT, power, socket, regulator, memory, four bytes each."""
_LINKS = {(1, 7): 264, (1, 8): 264}
_MOST_LINKS = 8
_ABSENT_16, _ABSENT_32, _ABSENT_64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1


class Metrics:
    """One reading.

    Attributes:
        slowed: What holds the clocks down, where the layout says so at once; `None` where it counts.
        counters: How long each cause has done so, where it counts.
        links: 1 for each XGMI link that is up, 0 for others; `None` where the layout does not say.
    """

    def __init__(self, data: bytes) -> None:
        revision = struct.unpack_from("BB", data, 2) if len(data) >= 4 else (0, 0)
        self.slowed = _slowed(data) if revision == (1, 3) else None
        self.counters = _counters(data, _RESIDENCIES.get(revision))
        self.links = _links(data, _LINKS.get(revision))


def between(before: Metrics, after: Metrics) -> list[str] | None:
    """Name what held the clocks down between two readings; `None` where the layout does not say."""
    if after.slowed is not None or after.counters is None or before.counters is None:
        return after.slowed
    return [name for name, count in after.counters.items() if count > before.counters.get(name, count)]


def _slowed(data: bytes) -> list[str] | None:
    bits = _at(data, "<Q", 112)
    if bits is None or bits == _ABSENT_64:
        return None
    return ["temperature"] if bits & _THERMAL_BITS else []


def _counters(data: bytes, offset: int | None) -> dict[str, int] | None:
    if offset is None:
        return None
    values = [_at(data, "<I", offset + 4 * i) for i in (0, 2, 3, 4)]
    return {name: value for name, value in zip(_COUNTERS, values) if value is not None and value != _ABSENT_32}


def _links(data: bytes, offset: int | None) -> list[int] | None:
    if offset is None:
        return None
    states = [_at(data, "<H", offset + 2 * i) for i in range(_MOST_LINKS)]
    up = [int(state == 1) for state in states if state is not None and state != _ABSENT_16]
    return up or None


def _at(data: bytes, form: str, offset: int) -> int | None:
    if offset + struct.calcsize(form) > len(data):
        return None
    value: int = struct.unpack_from(form, data, offset)[0]
    return value
