"""A cgroup of its own for each run, where the machine lets us make one: it holds whatever a worker starts.

Only version 2 is used for that, and only below our own cgroup, without turning on any controller: nothing is limited.
What others have limited is read in both versions.
"""

from __future__ import annotations

import contextlib
import os

from clusterctl.agent.linux.filesystems import list_mounts
from clusterctl.agent.linux.syscalls import read_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UNLIMITED = 1 << 60


def _find_mount(hierarchy: str, root: str = "") -> str | None:
    """Return where a hierarchy is mounted, by the name of its controller (empty: version 2)."""
    for mount in list_mounts(root):
        inside = mount.fstype == "cgroup" and hierarchy in mount.options.split(",")
        if inside if hierarchy else mount.fstype == "cgroup2":
            return root + mount.mount_point
    return None


def _read_own_path(hierarchy: str, root: str = "") -> str | None:
    """Return the path of our own cgroup in a hierarchy, by the name of its controller (empty: version 2)."""
    for line in read_bytes(f"{root}/proc/self/cgroup").decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if hierarchy in controllers.split(","):
            return path
    return None


def _list_own_folders(hierarchy: str, root: str = "") -> Iterator[str]:
    """Yield the folder of our own cgroup and of those above it.

    A container may see its own as the root of what is mounted, by a path that is the machine's: such folders are not
    there.
    """
    top, own = _find_mount(hierarchy, root), _read_own_path(hierarchy, root)
    while top is not None and own is not None:
        yield top + own.rstrip("/")
        if own in ("/", ""):
            return
        own = os.path.dirname(own)


def read_cpu_limit(root: str = "") -> float | None:
    """Return how many cores' time our cgroup and those above it may use, or `None` where none of them is limited."""
    limits = []
    for folder in _list_own_folders("", root):
        quota, _, period = read_bytes(f"{folder}/cpu.max").decode().strip().partition(" ")
        limits.append((quota, period))
    for folder in _list_own_folders("cpu", root):
        quota, period = (read_bytes(f"{folder}/cpu.cfs_{name}_us").decode().strip() for name in ("quota", "period"))
        limits.append((quota, period))
    # Unlimited is `max` in version 2 and -1 in version 1.
    return min((int(q) / int(p) for q, p in limits if q.isdigit() and p.isdigit() and int(p)), default=None)


def read_memory_limit(root: str = "") -> tuple[int, int] | None:
    """Return the least limit of memory of our cgroup and those above it, and the least that any of them leaves.

    Both in bytes; file pages that nobody has used lately count as free, as they do for the whole machine. `None` where
    none of them is limited.
    """
    return _read_limit_and_free(
        (("", "memory.max", "memory.current", "inactive_file"),
         ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
        root,
    )  # fmt: skip


def read_process_limit(root: str = "") -> tuple[int, int] | None:
    """Return the least limit of processes and threads, and how many more may be made; `None` where there is none."""
    return _read_limit_and_free(
        (("", "pids.max", "pids.current", None), ("pids", "pids.max", "pids.current", None)), root
    )


def _read_limit_and_free(files: Iterable[tuple[str, str, str, str | None]], root: str) -> tuple[int, int] | None:
    """Return the least limit and the least room below one.

    Args:
        files: Of each hierarchy its name, the files of limit and use, and what `memory.stat` calls use that can go.
        root: Prefix of all paths.
    """
    limits, available = [], []
    for hierarchy, of_limit, of_use, idle in files:
        for folder in _list_own_folders(hierarchy, root):
            limit = _read_limit(f"{folder}/{of_limit}")
            if limit is not None:
                limits.append(limit)
                available.append(
                    limit - (_read_limit(f"{folder}/{of_use}") or 0) + (_counter(folder, idle) if idle else 0)
                )
    return (min(limits), max(0, min(available))) if limits else None


def _read_limit(path: str) -> int | None:
    """Return a limit or a use; unlimited is `max` in version 2 and a number that no machine has in version 1."""
    text = read_bytes(path).strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def _counter(folder: str, name: str) -> int:
    return _read_counter(f"{folder}/memory.stat", name) or 0


def _read_counter(path: str, name: str) -> int | None:
    """Return what a file says of a name: lines of a name, a blank and a number."""
    pairs = (line.split(b" ") for line in read_bytes(path).splitlines())
    return next((int(pair[1]) for pair in pairs if pair[0] == name.encode() and pair[1:] and pair[1].isdigit()), None)


def create_cgroup(name: str) -> str | None:
    """Return the folder of a new cgroup below our own, or `None` where that is not possible."""
    top, own = _find_mount(""), _read_own_path("")
    if top is None or own is None:
        return None
    folder = os.path.join(top + own.rstrip("/"), f"clusterctl-{name}")
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(folder)
        except FileExistsError:
            raise
        except OSError:
            return None
    return folder if os.access(os.path.join(folder, "cgroup.procs"), os.W_OK) else None


def find_procs_file(folder: str | None) -> str | None:
    """Return the file that a process writes itself into to join."""
    return None if folder is None else os.path.join(folder, "cgroup.procs")


def list_members(folder: str | None) -> set[int]:
    """Return the pids in a cgroup and below it."""
    pids: set[int] = set()
    if folder is not None:
        for place, _, _ in os.walk(folder):
            pids.update(int(pid) for pid in read_bytes(os.path.join(place, "cgroup.procs")).split())
    return pids - {0}


def kill_members(folder: str | None) -> None:
    """Kill everything in a cgroup at once, where the kernel can (5.14)."""
    if folder is not None:
        with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.kill"), "w") as file:
            file.write("1")


def remove_cgroup(folder: str | None) -> None:
    """Remove an empty cgroup and those below it."""
    if folder is not None:
        for place, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(place)


def count_oom_kills() -> int | None:
    """Return how many processes the kernel killed for memory in our memory cgroup; `None` where that is not told."""
    for path in _list_oom_files():
        killed = _read_counter(path, "oom_kill")
        if killed is not None:
            return killed
    return None


def _list_oom_files() -> list[str]:
    files = []
    first = _read_own_path("memory")
    if first is not None:
        files.append(f"/sys/fs/cgroup/memory{first.rstrip('/')}/memory.oom_control")
    return [*files, *(f"{folder}/memory.events" for folder in _list_own_folders(""))]
