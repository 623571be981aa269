"""The machine and the limits that a worker would live under."""

from __future__ import annotations

import os
import resource

from clusterctl.agent.facts import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ENV_PREFIXES = (
    *("NCCL_", "GLOO_", "TP_", "CUDA_", "NVIDIA_", "OMP_", "TORCH_", "UCX_", "COMPUTE_PROFILE", "NSIGHT_"),
    *("HIP_", "ROCR_", "HSA_", "GPU_DEVICE_ORDINAL"),
)


def collect(root: str) -> dict[str, Any]:
    """Return the group `host`."""
    memory = _meminfo(root)
    return {
        "boot_id": paths.text(root, "/proc/sys/kernel/random/boot_id"),
        "machine_id": paths.text(root, "/etc/machine-id"),
        "netns": _link("/proc/self/ns/net"),
        "kernel": os.uname().release,
        "arch": os.uname().machine,
        "distro": _distro(root),
        "user": os.environ.get("USER") or str(os.getuid()),
        "uptime": _first_number(paths.text(root, "/proc/uptime")),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "load1": _first_number(paths.text(root, "/proc/loadavg")),
        "mem_total": memory.get("MemTotal"),
        "mem_available": memory.get("MemAvailable"),
        "swap_used": _less(memory.get("SwapTotal"), memory.get("SwapFree")),
        "governors": _governors(root),
        "clocksource": paths.text(root, "/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "nofile": _limit(resource.RLIMIT_NOFILE),
        "nproc": _limit(resource.RLIMIT_NPROC),
        "cgroup_mem_max": _cgroup_memory(root),
        "shm": _shm(root),
        "env": {k: v for k, v in os.environ.items() if k.startswith(_ENV_PREFIXES) or k == "LD_LIBRARY_PATH"},
    }


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _first_number(content: str | None) -> float | None:
    try:
        return float((content or "").split()[0])
    except (IndexError, ValueError):
        return None


def _less(total: int | None, free: int | None) -> int | None:
    return None if total is None or free is None else total - free


def _meminfo(root: str) -> dict[str, int]:
    """Return sizes of /proc/meminfo in bytes."""
    sizes = {}
    for line in (paths.text(root, "/proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    return sizes


def _distro(root: str) -> str | None:
    for line in (paths.text(root, "/etc/os-release") or "").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return None


def _governors(root: str) -> dict[str, int]:
    count: dict[str, int] = {}
    base = "/sys/devices/system/cpu"
    for name in paths.names(root, base):
        if name.startswith("cpu") and name[3:].isdigit():
            governor = paths.text(root, f"{base}/{name}/cpufreq/scaling_governor")
            if governor:
                count[governor] = count.get(governor, 0) + 1
    return count


def _cgroup_memory(root: str) -> int | None:
    """Return the tightest memory limit of this process's cgroup and those above it (cgroup v2), or `None`."""
    line = next((x for x in (paths.text(root, "/proc/self/cgroup") or "").splitlines() if x.startswith("0::")), "")
    place, limits = line[3:].strip("/"), []
    while True:
        base = "/sys/fs/cgroup/" + (place + "/" if place else "")
        content = paths.text(root, base + "memory.max")
        if content and content.isdigit():
            limits.append(int(content))
        if not place:
            return min(limits) if limits else None
        place = place.rpartition("/")[0]


def _shm(root: str) -> dict[str, int] | None:
    try:
        found = os.statvfs(paths.under(root, "/dev/shm"))  # noqa: S108, RUF100
    except OSError:
        return None
    return {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}
