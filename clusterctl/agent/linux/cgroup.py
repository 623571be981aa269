"""The cgroup of a run, and the limits of the cgroups that contain this process.

If this user may create cgroups, the supervisor makes a cgroup (version 2) without limits for all processes of a run.
The limits are read from cgroups of version 1 and version 2.
"""

from __future__ import annotations

import contextlib
import os

from clusterctl.agent.linux.filesystems import list_mounts
from clusterctl.agent.linux.syscalls import read_or_empty

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UNLIMITED = 1 << 60


def _find_mount(hierarchy: str, root: str = "") -> str | None:
    """Return the mount point of a cgroup hierarchy, which is a controller's name, or "" for version 2."""
    for mount in list_mounts(root):
        inside = mount.fstype == "cgroup" and hierarchy in mount.options.split(",")
        if inside if hierarchy else mount.fstype == "cgroup2":
            return root + mount.mount_point
    return None


def _read_own_path(hierarchy: str, root: str = "") -> str | None:
    """Return the path of this process's cgroup in a hierarchy, which is a controller's name, or "" for version 2."""
    for line in read_or_empty(f"{root}/proc/self/cgroup").decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if hierarchy in controllers.split(","):
            return path
    return None


def _list_own_folders(hierarchy: str, root: str = "") -> Iterator[str]:
    """Yield the folder of this process's cgroup, and the folders of all cgroups above it.

    In a container, some of these folders may not exist. The paths are those of the machine, but the mount shows only
    the cgroup of the container.
    """
    top, own = _find_mount(hierarchy, root), _read_own_path(hierarchy, root)
    while top is not None and own is not None:
        yield top + own.rstrip("/")
        if own in ("/", ""):
            return
        own = os.path.dirname(own)


def read_cpu_limit(root: str = "") -> float | None:
    """Return the number of CPU cores that this process's cgroup and those above it allow, or `None` without a limit."""
    limits = []
    for folder in _list_own_folders("", root):
        quota, _, period = read_or_empty(f"{folder}/cpu.max").decode().strip().partition(" ")
        limits.append((quota, period))
    for folder in _list_own_folders("cpu", root):
        quota, period = (read_or_empty(f"{folder}/cpu.cfs_{name}_us").decode().strip() for name in ("quota", "period"))
        limits.append((quota, period))
    # Unlimited is `max` in version 2 and -1 in version 1.
    return min((int(q) / int(p) for q, p in limits if q.isdigit() and p.isdigit() and int(p)), default=None)


def read_memory_limit(root: str = "") -> tuple[int, int] | None:
    """Return lowest memory limit and lowest free memory in bytes, of this process's cgroup and the cgroups above it.

    Inactive file pages count as free. The result is `None` without a limit.
    """
    return _read_limit_and_free(
        (("", "memory.max", "memory.current", "inactive_file"),
         ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
        root,
    )  # fmt: skip


def read_process_limit(root: str = "") -> tuple[int, int] | None:
    """Return the limit of processes and threads, and how many more may start; `None` without a limit."""
    return _read_limit_and_free(
        (("", "pids.max", "pids.current", None), ("pids", "pids.max", "pids.current", None)), root
    )


def _read_limit_and_free(files: Iterable[tuple[str, str, str, str | None]], root: str) -> tuple[int, int] | None:
    """Return the lowest limit and the lowest free amount of this process's cgroup and the cgroups above it.

    Args:
        files: For each hierarchy: name, file of the limit, and file of the use. The last element names the number in
            `memory.stat` that counts as free, or is `None`.
        root: Prefix of all paths.
    """
    limits, available = [], []
    for hierarchy, limit_file, use_file, free_name in files:
        for folder in _list_own_folders(hierarchy, root):
            limit = _read_limit(f"{folder}/{limit_file}")
            if limit is not None:
                limits.append(limit)
                reclaimable = _read_counter(f"{folder}/memory.stat", free_name) if free_name else None
                available.append(limit - (_read_limit(f"{folder}/{use_file}") or 0) + (reclaimable or 0))
    return (min(limits), max(0, min(available))) if limits else None


def _read_limit(path: str) -> int | None:
    """Return the number in a file, or `None` for "unlimited": `max` in version 2, a huge number in version 1."""
    text = read_or_empty(path).strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def _read_counter(path: str, name: str) -> int | None:
    """Return the number after a name in a file, each line of which consists of a name and a number."""
    pairs = (line.split(b" ") for line in read_or_empty(path).splitlines())
    return next((int(pair[1]) for pair in pairs if pair[0] == name.encode() and pair[1:] and pair[1].isdigit()), None)


def create_cgroup(name: str) -> str | None:
    """Create a cgroup below the cgroup of this process; return the new folder, or `None` on failure."""
    top, own = _find_mount(""), _read_own_path("")
    if top is None or own is None:
        return None
    folder = os.path.join(top + own.rstrip("/"), f"clusterctl-{name}")
    with contextlib.suppress(OSError):
        os.mkdir(folder)
    return folder if os.access(os.path.join(folder, "cgroup.procs"), os.W_OK) else None


def find_procs_file(folder: str | None) -> str | None:
    """Return the file `cgroup.procs` of a cgroup, into which a process writes its pid to join the cgroup."""
    return None if folder is None else os.path.join(folder, "cgroup.procs")


def list_members(folder: str | None) -> set[int]:
    """Return the pids of all processes in a cgroup and in the cgroups below it."""
    pids: set[int] = set()
    if folder is not None:
        for place, _, _ in os.walk(folder):
            pids.update(int(pid) for pid in read_or_empty(os.path.join(place, "cgroup.procs")).split())
    return pids - {0}


def kill_members(folder: str | None) -> None:
    """Kill all processes in a cgroup at once; do nothing before Linux 5.14."""
    if folder is not None:
        with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.kill"), "w") as file:
            file.write("1")


def remove_cgroup(folder: str | None) -> None:
    """Remove a cgroup and the cgroups below it, if they contain no process."""
    if folder is not None:
        for place, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(place)


def count_oom_kills() -> int | None:
    """Return how many processes the OOM killer killed in this process's cgroup; `None` if the kernel counts none."""
    files = [f"{folder}/memory.events" for folder in _list_own_folders("")]
    first = _read_own_path("memory")
    if first is not None:
        files.insert(0, f"/sys/fs/cgroup/memory{first.rstrip('/')}/memory.oom_control")
    counts = (_read_counter(path, "oom_kill") for path in files)
    return next((count for count in counts if count is not None), None)
