"""The clock for the times in a controller's journal."""

from __future__ import annotations

import time

_WALL_AT_IMPORT, _BOOTTIME_AT_IMPORT = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)


def read_head_time() -> float:
    """Return the wall clock at import plus the time since then.

    This time includes suspends of the head, and ignores changes of the head's clock.
    """
    return _WALL_AT_IMPORT + (time.clock_gettime(time.CLOCK_BOOTTIME) - _BOOTTIME_AT_IMPORT)
