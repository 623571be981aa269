"""Main memory, and whether anything moves between it and the swap space."""

from __future__ import annotations

import os
import time

from clusterctl.agent.linux import paths, proc, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import host as shapes

_PAUSE = 0.2
"""Seconds between two looks at what is swapped."""


def collect(root: str) -> shapes.Memory:
    """Return the memory's part of the group `host`."""
    sizes = proc.meminfo(root)
    total, free = sizes.get("SwapTotal"), sizes.get("SwapFree")
    used = None if total is None or free is None else total - free
    return {
        "mem_total": sizes.get("MemTotal"),
        "mem_available": sizes.get("MemAvailable"),
        "swap_used": used,
        # Nobody waits where nothing is swapped out.
        "swap_rate": _swapping(root) if used else 0.0 if used == 0 else None,
    }


def _swapping(root: str) -> float | None:
    """Return the bytes a second that go to the swap space and come from it."""
    began, before = time.monotonic(), _swapped(root)
    syscalls.pause(_PAUSE)
    after = _swapped(root)
    if before is None or after is None:
        return None
    return round((after - before) / (time.monotonic() - began))


def _swapped(root: str) -> int | None:
    pages = None
    for line in (paths.text(root, "/proc/vmstat") or "").splitlines():
        if line.startswith(("pswpin ", "pswpout ")):
            pages = (pages or 0) + int(line.split()[1])
    return None if pages is None else pages * os.sysconf("SC_PAGE_SIZE")
