"""Where the code lies on a node of which the cluster file does not say it: a folder of our own for each cluster."""

from __future__ import annotations

import os
import zlib

_PLACE = "~/.local/share/clusterctl/work"


def default_workdir(name: str, folder: str) -> str:
    """Return the folder of the code on other machines than this.

    Args:
        name: Of the cluster file. Two checkouts may have it in common, being that of their folder.
        folder: Absolute path of the cluster file's folder, which tells such checkouts apart.
    """
    return f"{_PLACE}/{name}-{zlib.crc32(os.fsencode(folder)):08x}"


def renamed(workdir: str | None, old: str, new: str) -> str | None:
    """Return what a folder of the cluster called `old` is for one called `new`; one that a person chose stays."""
    ours = f"{_PLACE}/{old}-"
    return workdir if workdir is None or not workdir.startswith(ours) else f"{_PLACE}/{new}-{workdir[len(ours) :]}"
