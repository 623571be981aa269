"""The environment of each worker: what is the launcher's alone, and what is set only where nobody else has. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterctl.config.spec import ClusterSpec, Framework
from clusterctl.plan.layout import job_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from clusterctl.plan.layout import Layout
    from clusterctl.plan.meeting import Meeting, NodeAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Which attempt of which run is being planned; `resume_from` is the newest checkpoint that all nodes see."""

    run: str
    attempt: int = 0
    max_restarts: int = 0
    resume_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What all workers of an attempt share.

    Attributes:
        interfaces: By node, the variables that name an interface.
    """

    spec: ClusterSpec
    identity: RunIdentity
    world: int
    nodes: int
    where: Meeting | None
    master_port: int | None
    frameworks: _Frameworks
    interfaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frameworks:
    """Addresses that only TensorFlow or JAX ask for."""

    tf_workers: tuple[str, ...] = ()
    jax_coordinator: str | None = None


def framework_values(
    spec: ClusterSpec, entries: Sequence[Layout], where: Meeting | None, ports: Mapping[str, Sequence[int]]
) -> _Frameworks:
    """Return what the framework of the job has its workers be told of each other."""
    framework = job_of(spec).framework
    if where is None or framework not in (Framework.TENSORFLOW, Framework.JAX):
        return _Frameworks()
    if framework is Framework.JAX:
        port = ports[entries[0].host.name][1]
        return _Frameworks(jax_coordinator=_endpoint(where.master_addr, port))
    workers = []
    for entry in entries:
        own = list(ports[entry.host.name])[-len(entry.ranks) :]
        workers += [_endpoint(where.addresses[entry.host.name], port) for port in own]
    return _Frameworks(tf_workers=tuple(workers))


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


TORCHRUN_SETS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def worker_environment(
    common: Common, entry: Layout, answer: NodeAnswer | None, rank: int, local: int
) -> Mapping[str, str]:
    """Return a worker's variables, which are laid over those of the login (see docs/values.md for the order)."""
    env: dict[str, str] = {}
    for _, part in sourced_environment(common, entry, answer, rank, local):
        env |= part
    return env


def sourced_environment(
    common: Common, entry: Layout, answer: NodeAnswer | None, rank: int, local: int
) -> list[tuple[str, Mapping[str, str]]]:
    """Return what is set for a worker, by the key of the cluster file that says so, or a word; later ones win."""
    return [
        ("default", _soft_environment(common, entry, answer)),
        ("network.interface", common.interfaces.get(entry.host.name, {})),
        ("gpus", _gpu_environment(entry, answer)),
        ("job.framework", _framework_environment(common, entry, answer, rank, local)),
        ("env", common.spec.env),
        ("hosts[].env", entry.host.env),
        ("clusterctl", _owned_environment(common, entry, rank, local)),
    ]


def replaced_of_login(spec: ClusterSpec, entry: Layout, answer: NodeAnswer | None, env: Mapping[str, str]) -> list[str]:
    """Return, in words, which variables of a login a worker gets with another value that `env` does not say."""
    login = {} if answer is None else answer.login
    chosen = spec.env.keys() | entry.host.env.keys() | spec.secrets.keys()
    names = [name for name, value in login.items() if value and env.get(name, value) != value and name not in chosen]
    return [f"{name}={login[name]} of its login is replaced by {env[name]}" for name in names]


def shared_environment(
    spec: ClusterSpec, identity: RunIdentity, entry: Layout, answer: NodeAnswer | None
) -> Mapping[str, str]:
    """Return the variables that all workers of a node will have, as far as they are known before any is planned."""
    common = Common(
        spec=spec, identity=identity, world=0, nodes=0, where=None, master_port=None, frameworks=_Frameworks()
    )
    owned = _owned_environment(common, entry, 0, 0)
    return {n: v for n, v in worker_environment(common, entry, answer, 0, 0).items() if n not in owned}


def _owned_environment(common: Common, entry: Layout, rank: int, local: int) -> dict[str, str]:
    identity = common.identity
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(common.world),
        "LOCAL_WORLD_SIZE": str(len(entry.ranks)),
        "GROUP_RANK": str(entry.node_rank),
        "GROUP_WORLD_SIZE": str(common.nodes),
        "NODE_RANK": str(entry.node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(common.world),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": identity.run,
        "TORCHELASTIC_RESTART_COUNT": str(identity.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(identity.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "CLUSTERCTL_RUN_ID": identity.run,
        "CLUSTERCTL_ATTEMPT": str(identity.attempt),
    }
    if common.where is not None:
        env["MASTER_ADDR"] = common.where.master_addr
    if common.master_port is not None:
        env["MASTER_PORT"] = str(common.master_port)
    if identity.resume_from is not None:
        env["CLUSTERCTL_RESUME_FROM"] = identity.resume_from
    return env


def _soft_environment(common: Common, entry: Layout, answer: NodeAnswer | None) -> dict[str, str]:
    env = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "PYTHONUNBUFFERED": "1",
    }
    if answer is not None:
        env["OMP_NUM_THREADS"] = str(max(1, answer.cores // max(1, len(entry.ranks))))
    return {name: value for name, value in env.items() if answer is None or name not in answer.login}


def _gpu_environment(entry: Layout, answer: NodeAnswer | None) -> dict[str, str]:
    env = {}
    if entry.gpus and not _is_amd(answer):
        # Indices are the driver's, by which GPUs are judged and claimed; CUDA's own begin with the fastest device.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if isinstance(entry.host.gpus, tuple):
        env |= _visible(answer, entry.host.gpus)
    return env


def _visible(answer: NodeAnswer | None, devices: Iterable[int]) -> dict[str, str]:
    """Return what shows a process some devices alone; HIP counts AMD's as their driver does, whatever their order."""
    name = "HIP_VISIBLE_DEVICES" if _is_amd(answer) else "CUDA_VISIBLE_DEVICES"
    return {name: ",".join(map(str, devices))}


def _is_amd(answer: NodeAnswer | None) -> bool:
    return answer is not None and answer.vendor == "amd"


def _framework_environment(
    common: Common, entry: Layout, answer: NodeAnswer | None, rank: int, local: int
) -> dict[str, str]:
    framework, values = job_of(common.spec).framework, common.frameworks
    one_device = {} if not entry.gpus else _visible(answer, _own_devices(entry, local))
    if framework is Framework.TENSORFLOW and values.tf_workers:
        task: dict[str, Any] = {
            "cluster": {"worker": list(values.tf_workers)},
            "task": {"type": "worker", "index": rank},
        }
        return {"TF_CONFIG": json.dumps(task), **one_device}
    if framework is Framework.JAX and values.jax_coordinator:
        address, _, port = values.jax_coordinator.rpartition(":")
        return {
            "KERAS_BACKEND": "jax",
            "JAX_COORDINATOR_ADDRESS": values.jax_coordinator,
            "JAX_COORDINATOR_PORT": port,
            "JAX_NUM_PROCESSES": str(common.world),
            "JAX_PROCESS_ID": str(rank),
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"{address}:{port}",
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(common.world),
            "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
            **one_device,
        }
    if framework is Framework.KERAS:
        return {"KERAS_BACKEND": "torch"}
    return {}


def _own_devices(entry: Layout, local: int) -> tuple[int, ...]:
    """Return the one device of a worker where frameworks would grab all; all of them for a lone worker."""
    return entry.gpus if len(entry.ranks) == 1 else (entry.gpus[local % len(entry.gpus)],)
