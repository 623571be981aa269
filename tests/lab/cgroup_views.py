"""What a node with cgroups of its own sees of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.lab import kernel

TOP: Final = "/sys/fs/cgroup"
PERIOD: Final = 100_000


def limits(folders: list[str]) -> dict[str, str]:
    """Return the hierarchies of version 1 that limit, each with what it says in a file of version 2."""
    found = {}
    for folder in map(Path, folders):
        if (folder / "memory.limit_in_bytes").exists():
            found["memory"] = (folder / "memory.limit_in_bytes").read_text().strip()
        if (folder / "cpu.cfs_quota_us").exists():
            quota = int((folder / "cpu.cfs_quota_us").read_text())
            name = "cpu,cpuacct" if (folder / "cpuacct.usage").exists() else "cpu"
            found[name] = f"{'max' if quota < 0 else quota} {PERIOD}"
    return found


def show(limited: dict[str, str], version: str) -> None:
    """Mount the groups whose first member the caller is.

    Args:
        limited: What `limits` has returned.
        version: `own`: as a machine of this kind shows them, one hierarchy of version 2, or one beside those of
            version 1. `v2`: all in version 2. Where the machine has the controllers in version 1, these are files that
            say what limits the node, in version 2's words; nothing can be changed in them.
    """
    if version == "v2" or not limited:
        kernel.mount("cgroup2", TOP, "cgroup2")
        if limited:
            _write_version_2(limited)
        return
    kernel.mount("tmpfs", TOP, "tmpfs", kernel.NOSUID | kernel.NODEV, "mode=755")
    for name in limited:
        os.mkdir(f"{TOP}/{name}")
        kernel.mount("cgroup", f"{TOP}/{name}", "cgroup", options=name)
    if "cpu,cpuacct" in limited:
        os.symlink("cpu,cpuacct", f"{TOP}/cpu")
    os.mkdir(f"{TOP}/unified")
    kernel.mount("cgroup2", f"{TOP}/unified", "cgroup2")


def _write_version_2(limited: dict[str, str]) -> None:
    kernel.mount("tmpfs", TOP, "tmpfs", kernel.NOSUID | kernel.NODEV, "mode=755")
    Path(TOP, "cgroup.controllers").write_text("cpu memory\n")
    for name, limit in limited.items():
        Path(TOP, name.replace(",cpuacct", "") + ".max").write_text(f"{limit}\n")
