"""Builds the environment variables of each worker: the variables of torchrun, and defaults for unset variables. Pure.

This module also chooses the network interface of each node, which NCCL, Gloo and torch's TensorPipe share.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterctl.agent.protocol.command_messages import (
    CACHE_VARIABLES,
    DOWNLOAD_VARIABLES,
    NETWORK_INTERFACE_VARIABLES,
)
from clusterctl.config.spec import ClusterSpec, Framework, HostSpec
from clusterctl.config.worker_variables import select_interfaces
from clusterctl.plan.layout import NodeLayout, get_job
from clusterctl.plan.rendezvous import NodeFacts, Rendezvous, can_reach_other_hosts, is_link_local


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Identifies the run and the attempt; `resume_from` is the newest checkpoint that all nodes can read."""

    run: str
    attempt: int = 0
    max_restarts: int = 0
    resume_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSettings:
    """Settings that all workers of an attempt share.

    Attributes:
        tf_workers: The address of each TensorFlow worker.
        jax_coordinator: The address of JAX's coordinator.
        interfaces: For each node: the environment variables that name the network interface to use.
        role_variables: The variables that tell the workers of a role the addresses of all roles.
    """

    spec: ClusterSpec
    identity: RunIdentity
    world_size: int
    node_count: int
    rendezvous: Rendezvous | None
    master_port: int | None
    tf_workers: Sequence[str] = ()
    jax_coordinator: str | None = None
    interfaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    role_variables: Mapping[str, str] = field(default_factory=dict)


def list_tensorflow_workers(
    layouts: Sequence[NodeLayout], rendezvous: Rendezvous, ports: Mapping[str, Sequence[int]]
) -> list[str]:
    """Return the address of each worker of TensorFlow, in the order of the ranks."""
    return [
        format_endpoint(rendezvous.addresses[layout.host.name], port)
        for layout in layouts
        for port in list(ports[layout.host.name])[-len(layout.ranks) :]
    ]


def format_endpoint(address: str, port: int) -> str:
    """Return address and port as one text, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def build_worker_environment(
    settings: AttemptSettings, layout: NodeLayout, facts: NodeFacts | None, rank: int, local_rank: int
) -> Mapping[str, str]:
    """Return the variables of a worker that override the variables of the login (see docs/values.md)."""
    env: dict[str, str] = {}
    for _, part in list_environment_sources(settings, layout, facts, rank, local_rank):
        env |= part
    return env


def list_environment_sources(
    settings: AttemptSettings, layout: NodeLayout, facts: NodeFacts | None, rank: int, local_rank: int
) -> list[tuple[str, Mapping[str, str]]]:
    """Return the variables of a worker, grouped by their source. Later groups override earlier groups.

    A source is a key of the cluster file, `default` or `clusterctl`.
    """
    return [
        ("default", _default_variables(settings, layout, facts)),
        ("job.cache", _cache_variables(settings, layout, facts)),
        ("network.interface", settings.interfaces.get(layout.host.name, {})),
        ("gpus", _gpu_variables(layout, facts)),
        ("job.framework", _framework_variables(settings, layout, facts, rank, local_rank)),
        ("env", settings.spec.env),
        ("hosts[].env", layout.host.env),
        ("clusterctl", {**_launcher_variables(settings, layout, rank, local_rank), **settings.role_variables}),
    ]


def describe_replaced_login_variables(
    spec: ClusterSpec, layout: NodeLayout, facts: NodeFacts | None, env: Mapping[str, str]
) -> list[str]:
    """Return a sentence for each login variable that clusterctl replaces although the cluster file does not set it."""
    login = {} if facts is None else facts.login_env
    chosen = spec.env.keys() | layout.host.env.keys() | spec.secrets.keys()
    names = [name for name, value in login.items() if value and env.get(name, value) != value and name not in chosen]
    return [f"{name}={login[name]} of its login is replaced by {env[name]}" for name in names]


def build_shared_environment(
    spec: ClusterSpec, identity: RunIdentity, layout: NodeLayout, facts: NodeFacts | None
) -> Mapping[str, str]:
    """Return the variables that all workers of a node share and that are known before the plan."""
    settings = AttemptSettings(
        spec=spec,
        identity=identity,
        world_size=0,
        node_count=0,
        rendezvous=None,
        master_port=None,
    )
    owned = _launcher_variables(settings, layout, 0, 0)
    return {n: v for n, v in build_worker_environment(settings, layout, facts, 0, 0).items() if n not in owned}


def _launcher_variables(settings: AttemptSettings, layout: NodeLayout, rank: int, local_rank: int) -> dict[str, str]:
    identity = settings.identity
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(settings.world_size),
        "LOCAL_WORLD_SIZE": str(len(layout.ranks)),
        "GROUP_RANK": str(layout.node_rank),
        "GROUP_WORLD_SIZE": str(settings.node_count),
        "NODE_RANK": str(layout.node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(settings.world_size),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": identity.run,
        "TORCHELASTIC_RESTART_COUNT": str(identity.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(identity.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "CLUSTERCTL_RUN_ID": identity.run,
        "CLUSTERCTL_ATTEMPT": str(identity.attempt),
    }
    if settings.rendezvous is not None:
        env["MASTER_ADDR"] = settings.rendezvous.master_addr
    if settings.master_port is not None:
        env["MASTER_PORT"] = str(settings.master_port)
    if identity.resume_from is not None:
        env["CLUSTERCTL_RESUME_FROM"] = identity.resume_from
    return env


def _default_variables(settings: AttemptSettings, layout: NodeLayout, facts: NodeFacts | None) -> dict[str, str]:
    env = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "PYTHONUNBUFFERED": "1",
    }
    if facts is not None:
        env["OMP_NUM_THREADS"] = str(max(1, facts.cores // max(1, len(layout.ranks))))
    return {name: value for name, value in env.items() if facts is None or name not in facts.login_env}


def _cache_variables(settings: AttemptSettings, layout: NodeLayout, facts: NodeFacts | None) -> dict[str, str]:
    """Return the variables that keep compiled code and downloads on a local disk of the node.

    TorchInductor keeps its code below /tmp by default, for all versions of torch. The other folders are in the home,
    which may be on a file server. Each environment and vendor of GPUs has a folder for compiled code of its own.
    """
    job = get_job(settings.spec)
    wanted = job.cache or ("node" if settings.spec.environment is not None else "none")
    if wanted == "none" or facts is None or not facts.state_root:
        return {}
    parts = (layout.host.python or "").split("/")
    environment = parts[-3] if len(parts) > 3 else "default"
    container = settings.spec.environment.container if settings.spec.environment is not None else None
    if container is not None:
        environment = f"image{zlib.crc32(container.image.encode()):08x}"
    folder = f"{facts.state_root}/caches/{environment}-{facts.vendor or 'cpu'}"
    env = {name: f"{folder}/{name.lower().removesuffix('_path').removesuffix('_dir')}" for name in CACHE_VARIABLES}
    chosen = facts.login_env.keys() | settings.spec.env.keys() | layout.host.env.keys()
    if facts.has_network_home and chosen.isdisjoint(DOWNLOAD_VARIABLES):
        # HF_HOME also contains the login of Hugging Face, which stays in the home.
        env["HF_HUB_CACHE"] = f"{facts.state_root}/caches/downloads"
    return {name: value for name, value in env.items() if name not in facts.login_env}


def _gpu_variables(layout: NodeLayout, facts: NodeFacts | None) -> dict[str, str]:
    env = {}
    if layout.gpus and not _is_amd(facts):
        # Health checks and claims count GPUs in the order of the driver. CUDA's default order begins with the fastest
        # GPU.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if isinstance(layout.host.gpus, tuple):
        env |= _visible_device_variables(facts, layout.host.gpus)
    return env


def _visible_device_variables(facts: NodeFacts | None, devices: Iterable[int]) -> dict[str, str]:
    """Return the variable that shows a process only these GPUs. HIP counts AMD's GPUs in the order of the driver."""
    name = "HIP_VISIBLE_DEVICES" if _is_amd(facts) else "CUDA_VISIBLE_DEVICES"
    return {name: ",".join(map(str, devices))}


def _is_amd(facts: NodeFacts | None) -> bool:
    return facts is not None and facts.vendor == "amd"


def _framework_variables(
    settings: AttemptSettings, layout: NodeLayout, facts: NodeFacts | None, rank: int, local_rank: int
) -> dict[str, str]:
    framework = get_job(settings.spec).framework
    # A process of these frameworks takes all GPUs that it sees. With several workers, each worker sees only one GPU.
    devices = layout.gpus if len(layout.ranks) == 1 else layout.gpus[local_rank % max(1, len(layout.gpus)) :][:1]
    one_device = _visible_device_variables(facts, devices) if layout.gpus else {}
    if framework is Framework.TENSORFLOW and settings.tf_workers:
        task: dict[str, Any] = {
            "cluster": {"worker": list(settings.tf_workers)},
            "task": {"type": "worker", "index": rank},
        }
        return {"TF_CONFIG": json.dumps(task), **one_device}
    if framework is Framework.JAX and settings.jax_coordinator:
        address, _, port = settings.jax_coordinator.rpartition(":")
        return {
            "KERAS_BACKEND": "jax",
            "JAX_COORDINATOR_ADDRESS": settings.jax_coordinator,
            "JAX_COORDINATOR_PORT": port,
            "JAX_NUM_PROCESSES": str(settings.world_size),
            "JAX_PROCESS_ID": str(rank),
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"{address}:{port}",
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(settings.world_size),
            "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
            **one_device,
        }
    if framework is Framework.KERAS:
        return {"KERAS_BACKEND": "torch"}
    return {}


@dataclass(frozen=True, slots=True)
class _NodeInterfaces:
    """The network interfaces of a node, and the environment variables that choose among them.

    Attributes:
        preferred: The interface to use by default; empty if none is known.
        named: The value of `network.interface`; empty if the node has no such interface.
        names: All interfaces of the node.
        file_env: Variables that the cluster file sets for the ranks of the node.
        login_env: Variables that the login on the node sets.
        has_choice: Whether NCCL can use several networks or RDMA on the node.
    """

    preferred: str
    named: str
    names: tuple[str, ...]
    file_env: Mapping[str, str]
    login_env: Mapping[str, str]
    has_choice: bool

    def choose_interface(self, env: Mapping[str, str]) -> str:
        """Return the interface of the node that `env` selects; empty if `env` selects none."""
        for name in NETWORK_INTERFACE_VARIABLES:
            found = self.matching_interfaces(name, env)
            if found:
                return self.preferred if self.preferred in found else found[0]
        return ""

    def matching_interfaces(self, name: str, env: Mapping[str, str]) -> list[str]:
        return select_interfaces(name, env[name], self.names) if env.get(name) else []


def choose_interface_variables(
    spec: ClusterSpec, hosts: Sequence[HostSpec], node_facts: Mapping[str, NodeFacts], routes: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return the interface variables to set on each node. Variables in `env` of the cluster file are left out.

    One source decides all three variables: `env`, or else `network.interface`, or else the logins, or else the route to
    the other nodes. The logins decide only if the login of each node names an interface.

    Args:
        spec: The spec of the cluster file.
        hosts: The hosts that take part.
        node_facts: The facts of each node; a node may be missing.
        routes: For each node: the interface through which the node reaches the other nodes.
    """
    nodes = {h.name: _collect_interfaces(spec, h, node_facts.get(h.name), routes.get(h.name, "")) for h in hosts}
    by_logins = all(node.choose_interface(node.login_env) for node in nodes.values())
    return {name: _choose_node_variables(node, by_login=by_logins) for name, node in nodes.items()}


def _collect_interfaces(spec: ClusterSpec, host: HostSpec, facts: NodeFacts | None, route: str) -> _NodeInterfaces:
    own = () if facts is None else facts.addresses
    file_env, login = {**spec.env, **host.env}, {} if facts is None else facts.login_env
    names = [*dict.fromkeys(name for name, _ in own), "lo"]
    if not own:
        # The node reported no interface. Assume that the node has the interfaces that the cluster file or the login
        # names.
        values = [
            env[name].lstrip("=") for env in (file_env, login) for name in NETWORK_INTERFACE_VARIABLES if env.get(name)
        ]
        names += [spec.network.interface or "lo", *(word for value in values for word in value.split(","))]
    several = len({name for name, address in own if can_reach_other_hosts(name) and not is_link_local(address)}) > 1
    has_choice = facts is not None and (facts.has_rdma or several)
    named = spec.network.interface if spec.network.interface in names else ""
    return _NodeInterfaces(named or route, named or "", tuple(names), file_env, login, has_choice=has_choice)


def _choose_node_variables(node: _NodeInterfaces, *, by_login: bool) -> dict[str, str]:
    wanted = node.choose_interface(node.file_env) or node.named
    by_login = by_login and not wanted
    interface = wanted or (node.choose_interface(node.login_env) if by_login else node.preferred)
    env = {}
    for name in NETWORK_INTERFACE_VARIABLES if interface else ():
        own = node.matching_interfaces(name, node.login_env)
        if name in node.file_env or (own and (by_login or own == [interface])):
            continue
        if name == "NCCL_SOCKET_IFNAME":
            # Without the variable, NCCL may use several networks together, or RDMA.
            if wanted or by_login or name in node.login_env or not node.has_choice:
                env[name] = f"={interface}"
        else:
            env[name] = interface
    return env
