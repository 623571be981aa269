"""How many files may be open: as many as the system allows, for a controller; what was set before, for its children."""

from __future__ import annotations

import contextlib
import resource

_ENOUGH = 65536
"""A program that closes all it could have open takes its time where the limit is a thousand times higher."""

_Limit = tuple[int, int]


class _Before:
    limit: _Limit | None = None


def raise_limit() -> None:
    """Raise the soft limit of this process to its hard one, within reason; never lower it."""
    soft, hard = _Before.limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft not in (resource.RLIM_INFINITY, wanted) and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_back(pid: int) -> None:
    """Give a child the limit that this process itself was started with: workers on this machine inherit it."""
    if _Before.limit is not None:
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _Before.limit)
