"""What may differ between the environment in which a zygote imports and that of a rank. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LATE = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("CLUSTERCTL_ATTEMPT", "CLUSTERCTL_RESUME_FROM", "CLUSTERCTL_STATUS_DIR", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What only a rank is told. A module that reads one of these when it is imported cannot be imported for all ranks."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
"""How many threads libraries take when they are loaded: one in a zygote, since a fork loses all but one."""
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch count GPUs without the CUDA driver, after which no fork of the process could use CUDA."""
CHANGES = (
    *("CLUSTERCTL_RUN_ID", "CLUSTERCTL_NODE"),
    *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "XDG_SESSION_ID"),
)
"""What is of one run or of one login. A zygote in which an import has read one of these serves its own run alone."""
_OF_A_RANK = (b"CLUSTERCTL_STATUS_DIR", b"TORCHELASTIC_ERROR_FILE")


def environment(of_workers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return what a zygote is started with, from what all workers of the node will have."""
    env = {name: value for name, value in of_workers.items() if name not in _OF_A_RANK}
    env.update(dict.fromkeys((name.encode() for name in THREADS), b"1"))
    return {**env, NVML.encode(): b"1"}


def lasting(of_workers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return what is the same in the next run, if that is the same job."""
    free = {*(name.encode() for name in CHANGES), *_OF_A_RANK}
    return {name: value for name, value in of_workers.items() if name not in free}


def differing(zygote: Mapping[bytes, bytes], rank: Mapping[bytes, bytes], secrets: Iterable[str]) -> list[str]:
    """Return the variables whose value what was imported may have read, and a rank has another."""
    free = {name.encode() for name in (*LATE, *THREADS, *CHANGES, NVML, *secrets)}
    names = (zygote.keys() | rank.keys()) - free
    return sorted(name.decode("utf-8", "replace") for name in names if zygote.get(name) != rank.get(name))
