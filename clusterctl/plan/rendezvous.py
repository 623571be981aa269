"""Plans the addresses and ports at which the workers of a run find each other. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from clusterctl.config.spec import ClusterSpec, Framework, HostSpec
from clusterctl.config.worker_variables import VIRTUAL_INTERFACE_PREFIXES
from clusterctl.errors import RefusedError
from clusterctl.plan.layout import NodeLayout, get_job

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A node's route to another node: the source address of the node, and the interface of this address if known."""

    source: str
    interface: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts of a node that the plan needs.

    Attributes:
        addresses: `(interface, address)` of interfaces that are up, without loopback.
        reached_at: The address at which the head reached the node, or `None`.
        gpus: Number of GPUs, or `None` if unknown.
        vendor: Vendor of the GPUs (`nvidia`, `amd`), or `None`.
        cores: The number of CPU cores that workers on the node may use.
        netns_id: Boot id and network namespace. Two nodes with equal values share one loopback interface.
        has_rdma: Whether the node has RDMA devices.
        login_env: The environment variables that the login on the node sets for the ranks.
        state_root: The folder of clusterctl on a local filesystem of the node; empty if unknown.
        has_network_home: Whether the home is on a file server.
    """

    node: str
    addresses: tuple[tuple[str, str], ...] = ()
    reached_at: str | None = None
    gpus: int | None = None
    vendor: str | None = None
    cores: int = 1
    netns_id: tuple[str, str] = ("", "")
    has_rdma: bool = False
    login_env: Mapping[str, str] = field(default_factory=dict)
    state_root: str = ""
    has_network_home: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address at which other nodes reach node 0, and the address and interface of each node."""

    master_addr: str
    addresses: Mapping[str, str]
    interfaces: Mapping[str, str]


def guess_address(host: HostSpec, facts: NodeFacts, interface: str | None) -> str | None:
    """Return the address at which other nodes can probably reach a node, while the routes are unknown.

    Raises:
        RefusedError: The node does not have the interface that the file names.
    """
    if host.internal_ip:
        return host.internal_ip
    if interface:
        return _find_address(facts, interface)
    if facts.reached_at in _list_usable_addresses(address for _, address in facts.addresses):
        return facts.reached_at
    return _choose_address(address for name, address in facts.addresses if can_reach_other_hosts(name))


def _find_address(facts: NodeFacts, interface: str) -> str:
    found = _choose_address(address for name, address in facts.addresses if name == interface)
    if found is None:
        names = ", ".join(sorted({name for name, _ in facts.addresses})) or "none"
        raise RefusedError(
            f"{facts.node}: no interface `{interface}` with an address (it has: {names})",
            hint="set `network.interface` to an interface that every node has, or remove it",
        )
    return found


def _list_usable_addresses(addresses: Iterable[str]) -> list[str]:
    """Return the addresses without link-local IPv6 addresses, which are valid only together with an interface."""
    return [a for a in addresses if ":" not in a or not is_link_local(a)]


def _choose_address(addresses: Iterable[str]) -> str | None:
    """Return the first usable address. IPv4 is preferred to IPv6, and IPv6 to link-local IPv4."""
    return min(_list_usable_addresses(addresses), key=lambda a: (is_link_local(a), ":" in a), default=None)


def can_reach_other_hosts(interface: str) -> bool:
    """Return whether an interface of this name may lead to other machines."""
    return not interface.startswith(("lo", *VIRTUAL_INTERFACE_PREFIXES))


def is_link_local(address: str) -> bool:
    """Return whether an address is link-local: valid only on one link of the network."""
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local


def can_use_loopback(node_facts: Sequence[NodeFacts]) -> bool:
    """Return whether all nodes share one machine and one network namespace, so that 127.0.0.1 is enough."""
    return len({a.netns_id for a in node_facts}) == 1


def choose_master_address(host: HostSpec, fallback: str | None, routes: Sequence[Route | None]) -> str | None:
    """Return the source address that node 0 uses on most routes to the other nodes."""
    if host.internal_ip:
        return host.internal_ip
    sources = Counter(r.source for r in routes if r is not None and not r.source.startswith("127."))
    return sources.most_common(1)[0][0] if sources else fallback


def plan_rendezvous(
    layouts: Sequence[NodeLayout],
    node_facts: Mapping[str, NodeFacts],
    master: str,
    routes_to_master: Mapping[str, Route | None],
) -> Rendezvous:
    """Return the rendezvous: address and interface of each node on the node's route to the master address.

    Raises:
        RefusedError: A node has no route to node 0.
    """
    addresses, interfaces = {}, {}
    for layout in layouts:
        name = layout.host.name
        if layout.node_rank == 0:
            addresses[name] = master
            interfaces[name] = find_interface(node_facts[name], master)
            continue
        route = routes_to_master.get(name)
        if route is None:
            raise RefusedError(
                f"{name} has no route to {master}, where rank 0 listens ({layouts[0].host.name})",
                hint="set `internal_ip` of the hosts, or `network.interface`, to the network that they share",
            )
        addresses[name] = layout.host.internal_ip or route.source
        interfaces[name] = find_interface(node_facts[name], addresses[name]) or route.interface or ""
    return Rendezvous(master_addr=master, addresses=addresses, interfaces=interfaces)


def plan_loopback_rendezvous(layouts: Sequence[NodeLayout]) -> Rendezvous:
    """Return the rendezvous on 127.0.0.1, for nodes that share one network namespace."""
    names = [e.host.name for e in layouts]
    return Rendezvous(
        master_addr=_LOOPBACK, addresses=dict.fromkeys(names, _LOOPBACK), interfaces=dict.fromkeys(names, "lo")
    )


def list_requested_ports(spec: ClusterSpec, layout: NodeLayout) -> tuple[int, ...]:
    """Return the ports that a node reserves for an attempt; 0 means any free port.

    Node 0 reserves the master port. With JAX, the second port of node 0 is the port of the coordinator. With
    TensorFlow, each node reserves one port per worker.
    """
    job = get_job(spec)
    ports: list[int] = []
    if layout.node_rank == 0:
        ports.append(spec.network.master_port or 0)
        if job.framework is Framework.JAX:
            ports.append(0)
    if job.framework is Framework.TENSORFLOW:
        ports += [0] * len(layout.ranks)
    return tuple(ports)


def find_interface(facts: NodeFacts, address: str) -> str:
    """Return the name of the interface with this address; empty without such an interface."""
    return next((name for name, own in facts.addresses if own == address), "")
