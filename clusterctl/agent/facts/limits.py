"""What a worker may take of the machine: limits of its process, and of the control groups around it."""

from __future__ import annotations

import os
import resource

from clusterctl.agent.linux import cgroup, paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import host as shapes

_CAP_IPC_LOCK, _CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 14, 21, 24
"""Numbers of capabilities (linux/capability.h)."""


def collect(root: str) -> shapes.Limits:
    """Return the limits' part of the group `host`."""
    groups = "" if root == "/" else root.rstrip("/")
    memory, processes = cgroup.memory(groups), cgroup.pids(groups)
    may = _capabilities(root)
    return {
        # The kernel asks neither limit of who has these (`ib_umem_get`, `copy_process`).
        "memlock": None if may >> _CAP_IPC_LOCK & 1 else _limit(resource.RLIMIT_MEMLOCK),
        "nproc": None if may & (1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE) else _limit(resource.RLIMIT_NPROC),
        "nofile": _limit(resource.RLIMIT_NOFILE),
        "cgroup_mem_max": memory[0] if memory else None,
        "cgroup_mem_free": memory[1] if memory else None,
        "pids_max": processes[0] if processes else None,
        "pids_free": processes[1] if processes else None,
        "cpu_quota": cgroup.cpu_limit(groups),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "shm": _shm(root),
    }


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _capabilities(root: str) -> int:
    """Return the capabilities that count on this machine; those of a user namespace do not."""
    if (paths.text(root, "/proc/self/uid_map") or "").split() != ["0", "0", "4294967295"]:
        return 0
    for line in (paths.text(root, "/proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _shm(root: str) -> shapes.Shm | None:
    try:
        statvfs = os.statvfs(paths.under(root, "/dev/shm"))  # noqa: S108, RUF100
    except OSError:
        return None
    return {"total": statvfs.f_blocks * statvfs.f_frsize, "free": statvfs.f_bavail * statvfs.f_frsize}
