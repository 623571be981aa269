"""Which network the ranks of a node use: NCCL, Gloo and torch's TensorPipe follow one choice. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.commands import NETWORK_INTERFACE_VARIABLES
from clusterctl.config.interfaces import selected
from clusterctl.plan.meeting import NodeAnswer, is_link_local, joins_machines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.config.spec import ClusterSpec, HostSpec


@dataclass(frozen=True, slots=True)
class _Node:
    """What is known of a node.

    Attributes:
        preferred: The interface that is taken where nobody names another one; empty where none is known.
        named: The one of `network.interface`; empty where that is not there.
        names: Its interfaces.
        written: What the cluster file sets for its ranks.
        login: What its login sets.
    """

    preferred: str
    named: str
    names: tuple[str, ...]
    written: Mapping[str, str]
    login: Mapping[str, str]
    is_free: bool

    def lead(self, env: Mapping[str, str]) -> str:
        """Return the interface that variables lead to; empty where they lead to none that is there."""
        for name in NETWORK_INTERFACE_VARIABLES:
            found = self.led_to(name, env)
            if found:
                return self.preferred if self.preferred in found else found[0]
        return ""

    def led_to(self, name: str, env: Mapping[str, str]) -> list[str]:
        return selected(name, env[name], self.names) if env.get(name) else []


def interface_environments(
    spec: ClusterSpec, hosts: Sequence[HostSpec], answers: Mapping[str, NodeAnswer], routes: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return by node what its ranks are told of interfaces, beside what the cluster file says in `env`.

    `env` decides, then `network.interface`, then the logins where all nodes have one that names an interface, then
    the route to the other nodes. What decides does so for all three variables.

    Args:
        spec: What the user asked for.
        hosts: Who takes part.
        answers: What they said of themselves.
        routes: By node, the interface on its route to the others.
    """
    nodes = {h.name: _node(spec, h, answers.get(h.name), routes.get(h.name, "")) for h in hosts}
    by_logins = all(node.lead(node.login) for node in nodes.values())
    return {name: _environment(node, by_login=by_logins) for name, node in nodes.items()}


def _node(spec: ClusterSpec, host: HostSpec, answer: NodeAnswer | None, route: str) -> _Node:
    own = () if answer is None else answer.addresses
    written, login = {**spec.env, **host.env}, {} if answer is None else answer.login
    names = [*dict.fromkeys(name for name, _ in own), "lo"]
    if not own:
        # It told no interface: those that somebody names are taken to be there.
        values = [
            env[name].lstrip("=") for env in (written, login) for name in NETWORK_INTERFACE_VARIABLES if env.get(name)
        ]
        names += [spec.network.interface or "lo", *(word for value in values for word in value.split(","))]
    several = len({name for name, address in own if joins_machines(name) and not is_link_local(address)}) > 1
    is_free = answer is not None and (answer.rdma or several)
    named = spec.network.interface if spec.network.interface in names else ""
    return _Node(named or route, named or "", tuple(names), written, login, is_free=is_free)


def _environment(node: _Node, *, by_login: bool) -> dict[str, str]:
    wanted = node.lead(node.written) or node.named
    by_login = by_login and not wanted
    lead = wanted or (node.lead(node.login) if by_login else node.preferred)
    env = {}
    for name in NETWORK_INTERFACE_VARIABLES if lead else ():
        own = node.led_to(name, node.login)
        if name in node.written or (own and (by_login or own == [lead])):
            continue
        if name == "NCCL_SOCKET_IFNAME":
            # Left to itself it may use several networks together, or RDMA.
            if wanted or by_login or name in node.login or not node.is_free:
                env[name] = f"={lead}"
        else:
            env[name] = lead
    return env
