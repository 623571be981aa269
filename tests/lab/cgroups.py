"""A cgroup for a node: below the one the lab runs in, seen by the node as the root of a hierarchy of its own.

Version 2 is used for holding processes, version 1 or 2 (whichever has the memory controller) for the limit.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.lab.waiting import wait_for

TOP: Final = Path("/sys/fs/cgroup")


def _mounts() -> dict[str, str]:
    """Where the hierarchies are mounted: `unified` for version 2, `memory` for version 1's."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split(" ")
        if kind == "cgroup2":
            found["unified"] = place
        elif kind == "cgroup" and "memory" in options.split(","):
            found["memory"] = place
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


def make(name: str, memory: str | None) -> list[str]:
    """Make a node's groups, `<lab>/<node>` in each hierarchy, and return their folders.

    Raises:
        RuntimeError: no memory controller of version 1 is here to limit with.
    """
    folders = {kind: _base(kind, mount) / name for kind, mount in _mounts().items()}
    if memory is not None and "memory" not in folders:
        raise RuntimeError("a limit of memory needs the memory hierarchy of cgroup version 1")
    for folder in folders.values():
        folder.mkdir(parents=True)
    if memory is not None:
        (folders["memory"] / "memory.limit_in_bytes").write_text(memory)
    return [str(folder) for folder in folders.values()]


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
