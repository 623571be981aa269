"""Who runs what: from the spec and the nodes' answers to ranks, rendezvous, environment and argv. Pure.

Host order is node rank; ranks are contiguous per node. What torchrun gives a worker, ours gives too (torch 2.13,
`torch/distributed/elastic/agent/server/local_elastic_agent.py`), with torchrun's meaning.
"""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.config.spec import ClusterSpec, Framework, HostSpec, JobSpec, Launcher
from clusterctl.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PYTHON = "{python}"
"""Stands for the interpreter that the node resolved; the supervisor puts its path there."""

_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lo", "tunl", "kube", "vnet")
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a node reaches another: its own address on the way, and the interface that holds it."""

    source: str
    interface: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """What a node said of itself, as far as planning needs it.

    Attributes:
        addresses: `(interface, address)` of interfaces that are up, without loopback.
        reached_at: The address under which the head reached it, or `None`.
        gpus: How many it has, or `None` where it could not tell.
        vendor: Whose they are (`nvidia`, `amd`), or `None`.
        cores: That its workers may use.
        place: What makes two nodes share their loopback: boot id and network namespace.
        rdma: It has RDMA devices.
    """

    node: str
    addresses: tuple[tuple[str, str], ...] = ()
    reached_at: str | None = None
    gpus: int | None = None
    vendor: str | None = None
    cores: int = 1
    place: tuple[str, str] = ("", "")
    rdma: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which ranks a node has."""

    host: HostSpec
    node_rank: int
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where workers meet: node 0's address as the others see it, and per node its own address and interface."""

    master_addr: str
    addresses: Mapping[str, str]
    interfaces: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker; `env` is what the launcher adds, merged over the node's own environment.

    Attributes:
        hosts: Where `argv` is a launcher of the node: the ranks that it starts. Else empty.
        hosted: What it starts as each of them.
    """

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    hosts: tuple[int, ...] = ()
    hosted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One node's part of an attempt."""

    node: str
    node_rank: int
    address: str | None
    workers: tuple[WorkerPlan, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the node, whoever starts them."""
        return tuple(rank for worker in self.workers for rank in (worker.hosts or (worker.rank,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A whole attempt, ready to be printed or sent."""

    run: str
    attempt: int
    world_size: int | None
    master_addr: str | None
    master_port: int | None
    nodes: tuple[NodePlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Which attempt of which run is being planned; `resume_from` is the newest checkpoint that all nodes see."""

    run: str
    attempt: int = 0
    max_restarts: int = 0
    resume_from: str | None = None


# --- ranks


def worker_count(host: HostSpec, found_gpus: int | None) -> int | None:
    """Return how many workers a host starts: what it says, else one a GPU, else 1; `None` until its GPUs are known."""
    if host.workers is not None:
        return host.workers
    gpus = found_gpus if host.gpus is None else _count(host.gpus)
    return None if gpus is None else max(gpus, 1)


def claimed_gpus(host: HostSpec, found_gpus: int | None) -> tuple[int, ...]:
    """Return the device indices that a run takes on a host: the list it names, or 0..N-1 for a count."""
    if isinstance(host.gpus, tuple):
        return host.gpus
    return tuple(range(found_gpus or 0 if host.gpus is None else host.gpus))


def _count(gpus: int | tuple[int, ...]) -> int:
    return len(gpus) if isinstance(gpus, tuple) else gpus


def layout(hosts: Sequence[HostSpec], found_gpus: Mapping[str, int | None]) -> tuple[Layout, ...]:
    """Return the ranks of each host, contiguous and in host order. Unknown counts give one rank."""
    result, first = [], 0
    for node_rank, host in enumerate(hosts):
        found = found_gpus.get(host.name)
        count = worker_count(host, found) or 1
        ranks = tuple(range(first, first + count))
        first += count
        result.append(Layout(host=host, node_rank=node_rank, ranks=ranks, gpus=claimed_gpus(host, found)))
    return tuple(result)


def ports_wanted(spec: ClusterSpec, entry: Layout) -> tuple[int, ...]:
    """Return the ports that a node holds for an attempt; 0 asks for any free one.

    Node 0 holds the master port first, then the JAX coordinator's; a TensorFlow node holds one a worker.
    """
    job = _job(spec)
    ports: list[int] = []
    if entry.node_rank == 0:
        ports.append(spec.network.master_port or 0)
        if job.framework is Framework.JAX:
            ports.append(0)
    if job.framework is Framework.TENSORFLOW:
        ports += [0] * len(entry.ranks)
    return tuple(ports)


# --- addresses


def provisional_address(host: HostSpec, answer: NodeAnswer, interface: str | None) -> str | None:
    """Return an address under which other nodes probably reach this one, before routes are asked.

    Raises:
        RefusedError: The interface that the file names is not there.
    """
    if host.internal_ip:
        return host.internal_ip
    if interface:
        return _on_interface(answer, interface)
    if answer.reached_at in _usable(address for _, address in answer.addresses):
        return answer.reached_at
    return _best(address for name, address in answer.addresses if not name.startswith(_VIRTUAL))


def _on_interface(answer: NodeAnswer, interface: str) -> str:
    found = _best(address for name, address in answer.addresses if name == interface)
    if found is None:
        names = ", ".join(sorted({name for name, _ in answer.addresses})) or "none"
        raise RefusedError(
            f"{answer.node}: no interface `{interface}` with an address (there are: {names})",
            hint="set `network.interface` to one that every node has, or leave it out",
        )
    return found


def _usable(addresses: Iterable[str]) -> list[str]:
    """Return the addresses that mean the same on every node: one of a link alone needs an interface with it in IPv6."""
    return [a for a in addresses if ":" not in a or not _is_link_local(a)]


def _best(addresses: Iterable[str]) -> str | None:
    """Return the first usable address: of IPv4, of IPv6, of an IPv4 link alone."""
    return min(_usable(addresses), key=lambda a: (_is_link_local(a), ":" in a), default=None)


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local


def share_loopback(answers: Sequence[NodeAnswer]) -> bool:
    """Return whether all nodes are one machine and one network namespace, so that they meet on 127.0.0.1."""
    return len({a.place for a in answers}) == 1


def master_address(host: HostSpec, fallback: str | None, routes: Sequence[Route | None]) -> str | None:
    """Return node 0's address as most other nodes see it: the source of its routes to them."""
    if host.internal_ip:
        return host.internal_ip
    sources = Counter(r.source for r in routes if r is not None and not r.source.startswith("127."))
    return sources.most_common(1)[0][0] if sources else fallback


def meeting(
    entries: Sequence[Layout],
    answers: Mapping[str, NodeAnswer],
    master: str,
    routes_to_master: Mapping[str, Route | None],
) -> Meeting:
    """Return where the workers of each node bind, given each node's route to the master address.

    Raises:
        RefusedError: A node has no route to node 0.
    """
    addresses, interfaces = {}, {}
    for entry in entries:
        name = entry.host.name
        if entry.node_rank == 0:
            addresses[name] = master
            interfaces[name] = _holder(answers[name], master)
            continue
        route = routes_to_master.get(name)
        if route is None:
            raise RefusedError(
                f"{name} has no route to {master}, where rank 0 listens ({entries[0].host.name})",
                hint="set `internal_ip` of the hosts, or `network.interface`, to the network that they share",
            )
        addresses[name] = entry.host.internal_ip or route.source
        interfaces[name] = _holder(answers[name], addresses[name]) or route.interface
    return Meeting(master_addr=master, addresses=addresses, interfaces=interfaces)


def loopback_meeting(entries: Sequence[Layout]) -> Meeting:
    """Return the meeting place of nodes that share one network namespace."""
    names = [e.host.name for e in entries]
    return Meeting(
        master_addr=_LOOPBACK, addresses=dict.fromkeys(names, _LOOPBACK), interfaces=dict.fromkeys(names, "lo")
    )


def _holder(answer: NodeAnswer, address: str) -> str:
    return next((name for name, own in answer.addresses if own == address), "")


# --- the plan


def plan_launch(
    spec: ClusterSpec,
    identity: RunIdentity,
    entries: Sequence[Layout],
    answers: Mapping[str, NodeAnswer],
    where: Meeting | None,
    ports: Mapping[str, Sequence[int]],
) -> LaunchPlan:
    """Return what every node must do for one attempt.

    Args:
        spec: What the user asked for.
        identity: Which attempt of which run.
        entries: Ranks of each node, in order of node rank.
        answers: What the nodes said of themselves; a node without one is planned with what is known.
        where: Addresses and interfaces, or `None` in a dry run.
        ports: The ports that each node holds, in the order of `ports_wanted`.
    """
    world = sum(len(e.ranks) for e in entries)
    held = list(ports.get(entries[0].host.name, ()))
    master_port = held[0] if held else spec.network.master_port
    common = _Common(
        spec=spec,
        identity=identity,
        world=world,
        nodes=len(entries),
        where=where,
        master_port=master_port,
        frameworks=_framework_values(spec, entries, where, ports),
    )
    nodes = tuple(_node_plan(common, entry, answers.get(entry.host.name)) for entry in entries)
    return LaunchPlan(
        run=identity.run,
        attempt=identity.attempt,
        world_size=world,
        master_addr=where.master_addr if where else None,
        master_port=master_port,
        nodes=nodes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
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


def _framework_values(
    spec: ClusterSpec, entries: Sequence[Layout], where: Meeting | None, ports: Mapping[str, Sequence[int]]
) -> _Frameworks:
    framework = _job(spec).framework
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


def _node_plan(common: _Common, entry: Layout, answer: NodeAnswer | None) -> NodePlan:
    if _job(common.spec).launcher is Launcher.TORCHRUN:
        workers: tuple[WorkerPlan, ...] = (_torchrun_plan(common, entry, answer),)
    else:
        workers = tuple(
            WorkerPlan(
                rank=rank,
                local_rank=local,
                argv=job_argv(_job(common.spec)),
                env=_environment(common, entry, answer, rank, local),
            )
            for local, rank in enumerate(entry.ranks)
        )
    name = entry.host.name
    address = common.where.addresses[name] if common.where else entry.host.internal_ip
    return NodePlan(node=name, node_rank=entry.node_rank, address=address, workers=workers)


def job_argv(job: JobSpec) -> tuple[str, ...]:
    """Return the argument list of one worker. A command given as a string goes to one `bash -c`."""
    match job:
        case JobSpec(script=str() as script):
            return (PYTHON, script, *job.args)
        case JobSpec(module=str() as module):
            return (PYTHON, "-m", module, *job.args)
        case JobSpec(command=str() as text):
            return ("bash", "-c", text, "bash", *job.args)
        case JobSpec(command=tuple() as argv):
            return (*argv, *job.args)
        case _:
            raise AssertionError("a job has one of script, module, command")


def _torchrun_plan(common: _Common, entry: Layout, answer: NodeAnswer | None) -> WorkerPlan:
    """Return the one process per node that starts real torchrun; its workers get their ranks from it."""
    master = common.where.master_addr if common.where else ""
    argv = [PYTHON, "-m", "torch.distributed.run", f"--nnodes={common.nodes}", f"--node-rank={entry.node_rank}"]
    argv += [f"--nproc-per-node={len(entry.ranks)}", "--rdzv-backend=static", "--max-restarts=0"]
    argv += [f"--master-addr={master}", f"--master-port={common.master_port or 0}"]
    argv += ["--signals-to-handle=SIGTERM,SIGINT,SIGQUIT", "--no-python"]
    env = dict(_environment(common, entry, answer, entry.ranks[0], 0))
    for name in _TORCHRUN_SETS:
        env.pop(name, None)
    return WorkerPlan(
        rank=entry.ranks[0],
        local_rank=0,
        argv=tuple(argv),
        env=env,
        hosts=entry.ranks,
        hosted=job_argv(_job(common.spec)),
    )


_TORCHRUN_SETS = (
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


def _environment(common: _Common, entry: Layout, answer: NodeAnswer | None, rank: int, local: int) -> Mapping[str, str]:
    """Return a worker's variables. What the user set wins, except over the names that only a launcher may set."""
    spec = common.spec
    env = _soft_environment(common, entry, answer)
    env |= _framework_environment(common, entry, answer, rank, local)
    env |= spec.env
    env |= entry.host.env
    env |= _owned_environment(common, entry, rank, local)
    return env


def _owned_environment(common: _Common, entry: Layout, rank: int, local: int) -> dict[str, str]:
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


def _soft_environment(common: _Common, entry: Layout, answer: NodeAnswer | None) -> dict[str, str]:
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
    names = {
        name for name, address in answer.addresses if not name.startswith(_VIRTUAL) and not _is_link_local(address)
    }
    return len(names) > 1


def _framework_environment(
    common: _Common, entry: Layout, answer: NodeAnswer | None, rank: int, local: int
) -> dict[str, str]:
    framework, values = _job(common.spec).framework, common.frameworks
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


def _job(spec: ClusterSpec) -> JobSpec:
    assert spec.job is not None, "the cluster file was parsed without a job"
    return spec.job


def known_entries(spec: ClusterSpec) -> tuple[Layout, ...] | None:
    """Return the layout where the file alone determines it, or `None` where a node must be asked for its GPUs."""
    if any(worker_count(h, None) is None for h in spec.workers):
        return None
    return layout(spec.workers, {})


_HIDDEN = "***"


def plan_json(plan: LaunchPlan, secrets: Mapping[str, str]) -> dict[str, Any]:
    """Return a plan in its published shape; secrets are hidden, and what only a node can tell is `None`."""
    hidden = dict.fromkeys(secrets, _HIDDEN)
    return {
        "run": plan.run,
        "world_size": plan.world_size,
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "nodes": [
            {
                "node": node.node,
                "node_rank": node.node_rank,
                "address": node.address,
                "workers": [
                    {
                        "rank": w.rank,
                        "local_rank": w.local_rank,
                        "argv": [None if a == PYTHON else a for a in (*w.argv, *w.hosted)],
                        "env": {**w.env, **hidden},
                    }
                    for w in node.workers
                ],
            }
            for node in plan.nodes
        ],
    }


def unknown_plan_json(spec: ClusterSpec, identity: RunIdentity) -> dict[str, Any]:
    """Return a plan in its published shape where only the nodes can tell how many workers there are."""
    nodes: list[dict[str, Any]] = [
        {"node": h.name, "node_rank": i, "address": h.internal_ip, "workers": []} for i, h in enumerate(spec.workers)
    ]
    return {
        "run": identity.run,
        "world_size": None,
        "master_addr": None,
        "master_port": spec.network.master_port,
        "nodes": nodes,
    }
