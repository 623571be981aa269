"""The front of a time index, which is given up with the output that it tells of: 16 B a second are much in a long run.

What is given up reads as zeros, and no record is all zeros: so the file itself says where it begins.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import run_files

if TYPE_CHECKING:
    from typing import Callable

_RECORD = run_files.INDEX_RECORD
_BLOCK = 4096


def first_valid(fd: int, size: int) -> int:
    """Return the first byte of an index of `size` bytes that is not given up."""
    return 0 if _told(fd, 0) else _first(fd, size, lambda told: told > 0) * _RECORD.size


def useless(fd: int, size: int, first_byte: int) -> int:
    """Return how many bytes at the front of an index tell of nothing but output before `first_byte`, in whole blocks.

    The last record of those stays: it tells when the first byte that there is was written at the earliest.
    """
    records = _first(fd, size, lambda told: told >= first_byte)
    return max(0, records - 1) * _RECORD.size // _BLOCK * _BLOCK


def _first(fd: int, size: int, holds: Callable[[int], bool]) -> int:
    low, high = 0, size // _RECORD.size
    while low < high:
        middle = (low + high) // 2
        if holds(_told(fd, middle)):
            high = middle
        else:
            low = middle + 1
    return low


def _told(fd: int, number: int) -> int:
    data = os.pread(fd, _RECORD.size, number * _RECORD.size)
    return int(_RECORD.unpack(data)[0]) if len(data) == _RECORD.size else 0
