"""A cgroup for a node: below the one the lab runs in, seen by the node as the root of a hierarchy of its own.

Version 2 is used for holding processes, version 1 or 2 (whichever has the memory controller) for the limit.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.lab.cgroup_views import PERIOD
from tests.lab.waiting import wait_for

TOP: Final = Path("/sys/fs/cgroup")


def _mounts() -> dict[str, str]:
    """Where the hierarchies are mounted: `unified` for version 2, `memory` and `cpu` for version 1's."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split(" ")
        if kind == "cgroup2":
            found["unified"] = place
        elif kind == "cgroup":
            found |= dict.fromkeys({"memory", "cpu"}.intersection(options.split(",")), place)
    return found


def _own(hierarchy: str) -> str:
    wanted = "" if hierarchy == "unified" else hierarchy
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if wanted in controllers.split(","):
            return path
    return "/"


def _base(hierarchy: str, mount: str) -> Path:
    return Path(mount + _own(hierarchy).rstrip("/"))


def make(name: str, memory: str | None = None, cpus: float | None = None) -> list[str]:
    """Make a node's groups, `<lab>/<node>` in each hierarchy, and return their folders.

    Raises:
        RuntimeError: the controller of version 1 that is to limit is not here.
    """
    mounts = _mounts()
    if cpus is None:
        mounts.pop("cpu", None)
    folders = {kind: _base(kind, mount) / name for kind, mount in mounts.items()}
    for kind, limit in (("memory", memory), ("cpu", cpus)):
        if limit is not None and kind not in folders:
            raise RuntimeError(f"a limit of {kind} needs the {kind} hierarchy of cgroup version 1")
    for folder in folders.values():
        folder.mkdir(parents=True)
    if memory is not None:
        (folders["memory"] / "memory.limit_in_bytes").write_text(memory)
    if cpus is not None:
        (folders["cpu"] / "cpu.cfs_quota_us").write_text(str(int(cpus * PERIOD)))
    return [str(folder) for folder in folders.values()]


def freeze(folders: list[str], *, frozen: bool) -> None:
    """Stop or let go on every process of a node at once, its PID 1 too; returns when all of them do.

    Raises:
        RuntimeError: there is no hierarchy of version 2 here.
    """
    folder = next((Path(f) for f in folders if Path(f, "cgroup.freeze").exists()), None)
    if folder is None:
        raise RuntimeError("to stop a node needs `cgroup` and the hierarchy of cgroup version 2")
    (folder / "cgroup.freeze").write_text(str(int(frozen)))
    state = f"frozen {int(frozen)}\n"
    wait_for(lambda: state in (folder / "cgroup.events").read_text(), what=f"`{state.strip()}` of {folder}")


def exist() -> bool:
    """Whether there is a cgroup of version 2 to make groups in, and controllers of version 1 to limit with."""
    return {"unified", "cpu", "memory"} <= set(_mounts())


def remove(folders: list[str]) -> None:
    """Remove groups, those made inside them and, with the last node, the lab's; their processes must be dying."""
    for folder in folders:
        wait_for(lambda folder=folder: _remove_tree(Path(folder)), what=f"{folder} to be empty")  # type: ignore[misc]
        with suppress(OSError):
            Path(folder).parent.rmdir()


def remove_stale(prefix: str) -> None:
    """Remove what is left of labs that have no folder any more."""
    for kind, mount in _mounts().items():
        for lab in _base(kind, mount).glob(f"{prefix}*"):
            if not Path("/tmp", lab.name).exists():
                _remove_tree(lab)


def _remove_tree(folder: Path) -> bool:
    for place, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(place)
    return not folder.exists()
