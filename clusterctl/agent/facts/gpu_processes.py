"""Describes the processes that the driver lists for a GPU, by their data in /proc."""

from __future__ import annotations

import os

from clusterctl.agent.facts.processes import get_run
from clusterctl.agent.linux import sysfs
from clusterctl.agent.linux.proc import sanitize_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_AGENTS = (
    "nv-hostengine",
    "dcgm-exporter",
    "nvidia-persiste",
    "nvidia-cuda-mps",
    "gpud",
    "nvidia-smi",
    "nvitop",
    "nvtop",
    "amd-smi",
    "rocm-smi",
    "gpuagent",
    "rdcd",
)
"""Monitoring programs that hold GPUs all the time and compute nothing; names as the kernel cuts them."""

UNKNOWN_PROCESS: dict[str, Any] = {"comm": None, "user": None, "run": None, "visible": False, "agent": False}
"""A process that is not visible from here."""


def describe_process(root: str, pid: int) -> dict[str, Any]:
    """Describe a process that the driver lists; processes of other containers may be invisible here."""
    comm = sysfs.read_text(root, f"/proc/{pid}/comm")
    try:
        owner: int | None = os.stat(sysfs.join_root(root, f"/proc/{pid}")).st_uid
    except OSError:
        owner = None
    run = get_run(root, pid) if comm else None
    comm = None if comm is None else sanitize_name(comm)
    return {"comm": comm, "user": owner, "run": run, "visible": comm is not None, "agent": comm in _AGENTS}
