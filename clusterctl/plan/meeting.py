"""Where the workers of a run meet: from what nodes tell of their addresses, and of the routes between them. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.config.interfaces import VIRTUAL
from clusterctl.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from clusterctl.config.spec import HostSpec
    from clusterctl.plan.layout import Layout

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a node reaches another: its own address on the way, and the interface that holds it, if any is known."""

    source: str
    interface: str | None


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
        login: What its login sets of the variables that ranks are given.
    """

    node: str
    addresses: tuple[tuple[str, str], ...] = ()
    reached_at: str | None = None
    gpus: int | None = None
    vendor: str | None = None
    cores: int = 1
    place: tuple[str, str] = ("", "")
    rdma: bool = False
    login: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where workers meet: node 0's address as the others see it, and per node its own address and interface."""

    master_addr: str
    addresses: Mapping[str, str]
    interfaces: Mapping[str, str]


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
    return _best(address for name, address in answer.addresses if joins_machines(name))


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
    return [a for a in addresses if ":" not in a or not is_link_local(a)]


def _best(addresses: Iterable[str]) -> str | None:
    """Return the first usable address: of IPv4, of IPv6, of an IPv4 link alone."""
    return min(_usable(addresses), key=lambda a: (is_link_local(a), ":" in a), default=None)


def joins_machines(interface: str) -> bool:
    """Return whether other machines may be reached by an interface, by its name."""
    return not interface.startswith(("lo", *VIRTUAL))


def is_link_local(address: str) -> bool:
    """Return whether an address holds on its link alone."""
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
            interfaces[name] = holder(answers[name], master)
            continue
        route = routes_to_master.get(name)
        if route is None:
            raise RefusedError(
                f"{name} has no route to {master}, where rank 0 listens ({entries[0].host.name})",
                hint="set `internal_ip` of the hosts, or `network.interface`, to the network that they share",
            )
        addresses[name] = entry.host.internal_ip or route.source
        interfaces[name] = holder(answers[name], addresses[name]) or route.interface or ""
    return Meeting(master_addr=master, addresses=addresses, interfaces=interfaces)


def loopback_meeting(entries: Sequence[Layout]) -> Meeting:
    """Return the meeting place of nodes that share one network namespace."""
    names = [e.host.name for e in entries]
    return Meeting(
        master_addr=_LOOPBACK, addresses=dict.fromkeys(names, _LOOPBACK), interfaces=dict.fromkeys(names, "lo")
    )


def holder(answer: NodeAnswer, address: str) -> str:
    """Return the interface that has an address; empty where none has."""
    return next((name for name, own in answer.addresses if own == address), "")
