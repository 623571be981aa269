"""The clock of what a controller writes down."""

from __future__ import annotations

import time

_WALL_AT_IMPORT, _MONO_AT_IMPORT = time.time(), time.monotonic()


def now() -> float:
    """Return the head's wall clock as it was at import, moved on by the monotonic clock: jumps do not reach it."""
    return _WALL_AT_IMPORT + (time.monotonic() - _MONO_AT_IMPORT)
