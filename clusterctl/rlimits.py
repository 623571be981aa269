"""Sets the resource limits of a controller (many open files, no core dumps), and restores them for its children."""

from __future__ import annotations

import contextlib
import errno
import resource

_MAX_OPEN_FILES = 65536
"""The largest soft limit to set, because some programs close every possible file descriptor at their start."""

_Limit = tuple[int, int]


class _OriginalLimits:
    limits: dict[int, _Limit] = {}  # noqa: RUF012 - the limits belong to the process


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the hard limit, but at most to 65536; never lower it."""
    soft, hard = _OriginalLimits.limits[resource.RLIMIT_NOFILE] = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft not in (resource.RLIM_INFINITY, wanted) and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def hint_for_too_many_open_files(error: OSError) -> str | None:
    """Return a hint if an error means that too many files are open; `None` for another error."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return "raise the limit of open files (`ulimit -n`); `clusterctl doctor` shows how many nodes it allows"


def disable_own_core_dumps() -> None:
    """Disable core dumps of this process, because they would contain the secrets of its run."""
    _, hard = _OriginalLimits.limits[resource.RLIMIT_CORE] = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def restore_rlimits(pid: int) -> None:
    """Give a child process the original limits of this process, so that workers on this machine inherit them."""
    for limit, before in _OriginalLimits.limits.items():
        with contextlib.suppress(OSError):
            resource.prlimit(pid, limit, before)
