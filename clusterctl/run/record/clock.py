"""The clock of what a controller writes down."""

from __future__ import annotations

import time

from clusterctl.run.record.writer import _MONO_AT_IMPORT, _WALL_AT_IMPORT


def now() -> float:
    """Return the head's wall clock as it was at import, moved on by the monotonic clock: jumps do not reach it."""
    return _WALL_AT_IMPORT + (time.monotonic() - _MONO_AT_IMPORT)
