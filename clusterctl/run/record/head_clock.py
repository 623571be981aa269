"""The clock of what a controller writes down."""

from __future__ import annotations

import time

_WALL_AT_IMPORT, _BOOTTIME_AT_IMPORT = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)


def read_head_time() -> float:
    """Return the head's wall clock as it was at import, moved on by the time since: sleep counts, jumps do not."""
    return _WALL_AT_IMPORT + (time.clock_gettime(time.CLOCK_BOOTTIME) - _BOOTTIME_AT_IMPORT)
