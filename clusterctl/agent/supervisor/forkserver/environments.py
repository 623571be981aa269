"""What may differ between the environment in which a forkserver imports and that of a rank. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

RANK_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("CLUSTERCTL_ATTEMPT", "CLUSTERCTL_RESUME_FROM", "CLUSTERCTL_STATUS_DIR", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What only a rank is told. If a module reads one of these when it is imported, it cannot be imported for all ranks."""
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch count GPUs without the CUDA driver, after which no fork of the process could use CUDA."""
_ROOM_BYTES = 16384
"""Room for the variables that only a rank has: the kernel shows them there."""


def common(workers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return what all workers of a node have alike, in each attempt."""
    names = {name.encode() for name in RANK_NAMES}
    return {name: value for name, value in workers.items() if name not in names}


def of_forkserver(workers: Mapping[bytes, bytes], control: int, shim: str) -> dict[bytes, bytes]:
    """Return what a forkserver is started with.

    Args:
        workers: What all workers of the node will have.
        control: Number of its connection.
        shim: Folder of our `sitecustomize`, which has to be on the path.
    """
    env = common(workers)
    path = env.get(b"PYTHONPATH", b"")
    folder = shim.encode("utf-8", "surrogateescape")
    last = {b"CLUSTERCTL_FORKSERVER": b"%d:" % control + b" " * _ROOM_BYTES, _NVML.encode(): b"1"}
    if path.split(b":")[0] != folder:
        last[b"PYTHONPATH"] = folder + b":" + path if path else folder
    return {**{name: value for name, value in env.items() if name not in last}, **last}


def differing(common: Mapping[bytes, bytes], rank: Mapping[bytes, bytes], secrets: Iterable[str]) -> list[str]:
    """Return the variables that a rank has otherwise than all workers of its node: imports may have read them."""
    free = {name.encode() for name in (*RANK_NAMES, *secrets)}
    names = (common.keys() | rank.keys()) - free
    return sorted(name.decode("utf-8", "replace") for name in names if common.get(name) != rank.get(name))
