"""Which signals a process was told to ignore, as the kernel says."""

from __future__ import annotations

_OF_THE_C_LIBRARY = {32, 33}
"""It keeps these to itself: nobody can set them through it, and it has the children of `posix_spawn` ignore them (make's are)."""


def ignored(status: str) -> set[int]:
    """Return the numbers in the line `SigIgn:` of a `/proc/PID/status`, but for those that the C library keeps to itself."""
    mask = int(status.split("SigIgn:")[1].split(maxsplit=1)[0], 16)
    return {bit + 1 for bit in range(64) if mask >> bit & 1} - _OF_THE_C_LIBRARY
