"""Limits of a controller: many open files and no core dump; its children get what was set before."""

from __future__ import annotations

import contextlib
import errno
import resource

_MAX_OPEN_FILES = 65536
"""A program that closes all it could have open takes its time where the limit is a thousand times higher."""

_Limit = tuple[int, int]


class _OriginalLimits:
    limits: dict[int, _Limit] = {}  # noqa: RUF012 - one process, one answer


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the hard one, within reason; never lower it."""
    soft, hard = _OriginalLimits.limits[resource.RLIMIT_NOFILE] = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft not in (resource.RLIM_INFINITY, wanted) and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def hint_for_too_many_open_files(error: OSError) -> str | None:
    """Return what helps where an error says that too many files are open; `None` for any other."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return "raise the limit of open files (`ulimit -n`); `clusterctl doctor` tells how many nodes it allows"


def disable_core_dumps() -> None:
    """Let this process leave no core dump, which would hold the secrets of its run."""
    _, hard = _OriginalLimits.limits[resource.RLIMIT_CORE] = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def restore_rlimits(pid: int) -> None:
    """Give a child the limits that this process itself was started with: workers on this machine inherit them."""
    for limit, before in _OriginalLimits.limits.items():
        with contextlib.suppress(OSError):
            resource.prlimit(pid, limit, before)
