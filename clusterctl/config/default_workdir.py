"""The default folder of the code on nodes. Two checkouts of one cluster file never share it."""

from __future__ import annotations

import os
import zlib

_WORKDIR_ROOT = "~/.local/share/clusterctl/work"


def build_default_workdir(name: str, folder: str) -> str:
    """Return the default folder of the code on other machines.

    Args:
        name: Name of the cluster file. Two checkouts may share it, as it defaults to the name of their folder.
        folder: Absolute path of the cluster file's folder, which distinguishes such checkouts.
    """
    return f"{_WORKDIR_ROOT}/{name}-{zlib.crc32(os.fsencode(folder)):08x}"


def rename_default_workdir(workdir: str | None, old: str, new: str) -> str | None:
    """Return the default workdir of cluster `old` for a cluster named `new`; a workdir that a person chose stays."""
    ours = f"{_WORKDIR_ROOT}/{old}-"
    return (
        workdir if workdir is None or not workdir.startswith(ours) else f"{_WORKDIR_ROOT}/{new}-{workdir[len(ours) :]}"
    )
