"""The environment of each worker: what is the launcher's alone, and what is set only where nobody else has. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.config.spec import ClusterSpec, Framework
from clusterctl.plan.layout import job_of
from clusterctl.plan.meeting import Meeting, NodeAnswer, is_link_local, joins_machines

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from clusterctl.plan.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Which attempt of which run is being planned; `resume_from` is the newest checkpoint that all nodes see."""

    run: str
    attempt: int = 0
    max_restarts: int = 0
    resume_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What all workers of an attempt share."""

    spec: ClusterSpec
    identity: RunIdentity
    world: int
    nodes: int
    where: Meeting | None
    master_port: int | None
    frameworks: _Frameworks


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
    """Return a worker's variables. What the user set wins, except over the names that only a launcher may set."""
    spec = common.spec
    env = _soft_environment(common, entry, answer)
    env |= _framework_environment(common, entry, answer, rank, local)
    env |= spec.env
    env |= entry.host.env
    env |= _owned_environment(common, entry, rank, local)
    return env


def shared_environment(
    spec: ClusterSpec, identity: RunIdentity, entry: Layout, answer: NodeAnswer | None
) -> Mapping[str, str]:
    """Return the variables that all workers of a node will have, as far as they are known before any is planned."""
    common = Common(
        spec=spec, identity=identity, world=0, nodes=0, where=None, master_port=None, frameworks=_Frameworks()
    )
    env = _soft_environment(common, entry, answer)
    env |= _framework_environment(common, entry, answer, 0, 0)
    return env | spec.env | entry.host.env


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
    if entry.gpus and not _is_amd(answer):
        # Indices are the driver's, by which GPUs are judged and claimed; CUDA's own begin with the fastest device.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if isinstance(entry.host.gpus, tuple):
        env |= _visible(answer, entry.host.gpus)
    interface = common.where.interfaces.get(entry.host.name, "") if common.where else ""
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface
        env["TP_SOCKET_IFNAME"] = interface
        if answer is None or not (answer.rdma or _several_networks(answer)):
            env["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return env


def _visible(answer: NodeAnswer | None, devices: Iterable[int]) -> dict[str, str]:
    """Return what shows a process some devices alone; HIP counts AMD's as their driver does, whatever their order."""
    name = "HIP_VISIBLE_DEVICES" if _is_amd(answer) else "CUDA_VISIBLE_DEVICES"
    return {name: ",".join(map(str, devices))}


def _is_amd(answer: NodeAnswer | None) -> bool:
    return answer is not None and answer.vendor == "amd"


def _several_networks(answer: NodeAnswer) -> bool:
    """Return whether a node has more than one real interface that NCCL may want to use together."""
    names = {name for name, address in answer.addresses if joins_machines(name) and not is_link_local(address)}
    return len(names) > 1


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
