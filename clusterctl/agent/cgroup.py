"""A cgroup of its own for each run, where the machine lets us make one: it holds whatever a worker starts.

Only version 2 is used for that, and only below our own cgroup, without turning on any controller: nothing is limited.
"""

from __future__ import annotations

import contextlib
import os
import re

from clusterctl.agent.system import read_bytes


def _unified() -> str | None:
    """Return where the version 2 hierarchy is mounted."""
    for line in read_bytes("/proc/self/mounts", 4 << 20).decode("utf-8", "replace").splitlines():
        fields = line.split(" ")
        if len(fields) > 2 and fields[2] == "cgroup2":
            return fields[1]
    return None


def _own(hierarchy: str) -> str | None:
    """Return the path of our own cgroup in a hierarchy, by the name of its controller (empty: version 2)."""
    for line in read_bytes("/proc/self/cgroup").decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if hierarchy in controllers.split(","):
            return path
    return None


def make(name: str) -> str | None:
    """Return the folder of a new cgroup below our own, or `None` where that is not possible."""
    top, own = _unified(), _own("")
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


def procs(folder: str | None) -> str | None:
    """Return the file that a process writes itself into to join."""
    return None if folder is None else os.path.join(folder, "cgroup.procs")


def members(folder: str | None) -> set[int]:
    """Return the pids in a cgroup and below it."""
    found: set[int] = set()
    if folder is not None:
        for place, _, _ in os.walk(folder):
            found.update(int(pid) for pid in read_bytes(os.path.join(place, "cgroup.procs")).split())
    return found - {0}


def kill(folder: str | None) -> None:
    """Kill everything in a cgroup at once, where the kernel can (5.14)."""
    if folder is not None:
        with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.kill"), "w") as file:
            file.write("1")


def remove(folder: str | None) -> None:
    """Remove an empty cgroup and those below it."""
    if folder is not None:
        for place, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(place)


def oom_kills() -> int | None:
    """Return how many processes the kernel killed for memory in our memory cgroup; `None` where that is not told."""
    for path in _oom_files():
        found = re.search(rb"^oom_kill (\d+)$", read_bytes(path), re.MULTILINE)
        if found:
            return int(found[1])
    return None


def _oom_files() -> list[str]:
    files = []
    first = _own("memory")
    if first is not None:
        files.append(f"/sys/fs/cgroup/memory{first.rstrip('/')}/memory.oom_control")
    top, own = _unified(), _own("")
    while top is not None and own is not None:
        files.append(f"{top}{own.rstrip('/')}/memory.events")
        if own in ("/", ""):
            break
        own = os.path.dirname(own)
    return files
