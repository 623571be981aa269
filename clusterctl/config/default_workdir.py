"""The default workdir and the environment on nodes. Two checkouts of the same cluster file get different ones."""

from __future__ import annotations

import os
import zlib

from clusterctl.agent.protocol.command_messages import ENVIRONMENTS_FOLDER

_WORKDIR_ROOT = "~/.local/share/clusterctl/work"


def build_default_workdir(cluster_name: str, cluster_folder: str) -> str:
    """Return the folder of the code on a node for a cluster file without `workdir`.

    Args:
        cluster_name: `name` of the cluster file. Two checkouts may have the same name.
        cluster_folder: Absolute path of the cluster file's folder. The hash of this path distinguishes checkouts.
    """
    return f"{_WORKDIR_ROOT}/{cluster_name}-{zlib.crc32(os.fsencode(cluster_folder)):08x}"


def build_environment_python(*settings: str | None) -> str:
    """Return the path on a node of the Python that the last `up` with these settings has made, through a link."""
    digest = zlib.crc32("\0".join(part or "" for part in settings).encode("utf-8", "surrogateescape"))
    return f"~/{ENVIRONMENTS_FOLDER}/.current/{digest:08x}/bin/python"


def rename_default_workdir(workdir: str | None, old: str, new: str) -> str | None:
    """Replace the cluster name `old` in a default workdir by `new`; return any other workdir unchanged."""
    prefix = f"{_WORKDIR_ROOT}/{old}-"
    return (
        workdir
        if workdir is None or not workdir.startswith(prefix)
        else f"{_WORKDIR_ROOT}/{new}-{workdir[len(prefix) :]}"
    )
