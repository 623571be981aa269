"""The network between the nodes: the address of the rendezvous, and probes of ports and links before workers start.

NCCL and Gloo connect ranks of all nodes at ports that the kernel picks, in both directions, with packets as large as
the interfaces allow. So a probe sends much data to a neighbour and back, because a few bytes at one port would prove
nothing.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterctl.agent.protocol.command_payload_types import (
    ConnectAnswer,
    ConnectArguments,
    HelloAnswer,
    ListenArguments,
)
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.errors import ClusterctlError, RefusedError
from clusterctl.plan import rendezvous
from clusterctl.plan.environment import choose_interface_variables
from clusterctl.plan.layout import NodeLayout
from clusterctl.run.nodes.fan_out import call_all, raise_first
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import CONNECT, LISTEN, ROUTES, UNLISTEN

_PORT_TIMEOUT_S = 2.0
"""Seconds that a node may take to reach a port. If it takes longer, a firewall must be dropping the packets."""
_EXCHANGE_TIMEOUT_S = 4.0
"""Seconds that one exchange may take. Two lost packets at the start cost three seconds."""
_MARGIN_S = 4.0
_PAYLOAD_BYTES = 256 * 1024
"""Bytes to exchange in each direction. So many bytes fill many packets of any size, and are still exchanged fast."""


def build_node_facts(host: HostSpec, hello: HelloAnswer) -> rendezvous.NodeFacts:
    """Return the facts that the plan needs from the first answer of a node's agent."""
    addresses = tuple(
        (a["interface"], a["address"]) for a in hello.get("addresses", []) if a.get("up") and not a.get("loopback")
    )
    return rendezvous.NodeFacts(
        node=host.name,
        addresses=addresses,
        reached_at=hello.get("reached_at"),
        gpus=(hello.get("gpus") or {}).get("count"),
        vendor=(hello.get("gpus") or {}).get("vendor"),
        cores=int(hello.get("cores") or 1),
        netns_id=(hello.get("boot_id", ""), hello.get("net_ns", "")),
        has_rdma=bool(hello.get("rdma")),
        login_env=hello.get("login") or {},
        state_root=hello.get("state_root") or "",
        has_network_home=bool(hello.get("home_is_network")),
    )


def _build_facts_by_node(hosts: Iterable[HostSpec], sessions: Mapping[str, Session]) -> dict[str, rendezvous.NodeFacts]:
    return {host.name: build_node_facts(host, sessions[host.name].hello) for host in hosts if host.name in sessions}


def resolve_rendezvous(
    spec: ClusterSpec,
    layouts: Sequence[NodeLayout],
    answers: Mapping[str, rendezvous.NodeFacts],
    sessions: Mapping[str, Session],
) -> rendezvous.Rendezvous:
    """Return the rendezvous of the workers of all nodes.

    All nodes report routes at once: node 0 to all other nodes, and each other node to the guessed address of node 0. If
    the routes of node 0 show another address, the other nodes report their route to that address.

    Raises:
        RefusedError: A node could not reach the others, or lacks the interface that the file names.
        NodeError, NodesError: A node could not be asked.
    """
    if rendezvous.can_use_loopback(list(answers.values())):
        return rendezvous.plan_loopback_rendezvous(layouts)
    hosts = [entry.host for entry in layouts]
    own = {h.name: rendezvous.guess_address(h, answers[h.name], spec.network.interface) for h in hosts}
    first, others = hosts[0], [host.name for host in hosts[1:]]
    guess = own[first.name]
    targets = {first.name: _list_others(own, first)} | ({node: [guess] for node in others} if guess else {})
    routes = ask_routes(sessions, targets)
    master = _choose_master(spec, first, own, routes[first.name])
    if master != guess:
        routes |= ask_routes(sessions, {node: [master] for node in others})
    to_master = {node: routes[node].get(master) for node in others}
    if spec.network.interface:
        to_master = {n: rendezvous.Route(source=own[n] or "", interface=spec.network.interface) for n in others}
    return rendezvous.plan_rendezvous(layouts, answers, master, to_master)


def _list_others(own: Mapping[str, str | None], first: HostSpec) -> list[str]:
    return [address for node, address in own.items() if address and node != first.name]


def _choose_master(
    spec: ClusterSpec,
    first: HostSpec,
    own: Mapping[str, str | None],
    routes: Mapping[str, rendezvous.Route | None],
) -> str:
    """Return the source address of the first host on its routes to the other nodes.

    Raises:
        RefusedError: The first host has no address that the other nodes could reach.
    """
    master = own[first.name]
    if first.internal_ip or not spec.network.interface:
        known = [routes.get(address) for address in _list_others(own, first)]
        master = rendezvous.choose_master_address(first, master, known)
    if master is None:
        raise RefusedError(
            f"{first.name} has no address that other nodes could reach",
            hint="set `internal_ip` of its host, or `network.interface`",
        )
    return master


def ask_routes(
    sessions: Mapping[str, Session], targets: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, rendezvous.Route | None]]:
    """Return the route of each node to each of its target addresses; no packet is sent.

    Raises:
        NodeError, NodesError: A node could not be asked.
    """

    def ask(node: str, session: Session) -> dict[str, rendezvous.Route | None]:
        answer = ROUTES.call(session, {"targets": list(targets[node])})["routes"]
        return {
            t: rendezvous.Route(source=r["source"], interface=r["interface"]) if r else None for t, r in answer.items()
        }

    answered, errors = call_all({node: sessions[node] for node in targets}, ask)
    raise_first(errors)
    return answered


def guess_addresses(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, str]:
    """Return the probable address of each node for the other nodes. Nodes that report no address are left out."""
    node_facts = _build_facts_by_node(spec.hosts, sessions)
    if node_facts and rendezvous.can_use_loopback(list(node_facts.values())):
        return dict.fromkeys(node_facts, "127.0.0.1")
    addresses: dict[str, str] = {}
    for host in (host for host in spec.hosts if host.name in node_facts):
        try:
            address = rendezvous.guess_address(host, node_facts[host.name], spec.network.interface)
        except RefusedError:
            address = node_facts[host.name].reached_at
        if address:
            addresses[host.name] = address
    return addresses


def guess_interfaces(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, dict[str, str]]:
    """Return the interface variables that the ranks of each node will probably get, besides those in `env`."""
    node_facts = _build_facts_by_node(spec.hosts, sessions)
    routes = {
        node: "lo" if address == "127.0.0.1" else rendezvous.find_interface(node_facts[node], address)
        for node, address in guess_addresses(spec, sessions).items()
    }
    return choose_interface_variables(
        spec, [host for host in spec.hosts if host.name in node_facts], node_facts, routes
    )


def _connect(
    session: Session, address: str, port: int, nonce: str, *, timeout_s: float, payload: int = 0
) -> ConnectAnswer:
    question: ConnectArguments = {"address": address, "port": port, "nonce": nonce, "timeout": timeout_s}
    if payload:
        question["payload"] = payload
    return CONNECT.call(session, question, timeout=timeout_s + _MARGIN_S)


def probe_rendezvous_port(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, dict[str, Any]]:
    """Try the rendezvous port. Return the result of each node, for `facts["controller"]["rendezvous"]` of the node.

    The first connected worker of the cluster file listens at the address that the workers would get, on the port that
    the file names or on any free port. The result is empty with fewer than two connected nodes.
    """
    hosts = [h for h in (*spec.worker_hosts, *spec.spare_hosts) if h.name in sessions]
    if len(hosts) < 2:
        return {}
    first, node_facts = hosts[0], _build_facts_by_node(hosts, sessions)
    nonce = secrets.token_hex(16)
    address: str | None = None
    port = spec.network.master_port or 0
    try:
        if rendezvous.can_use_loopback(list(node_facts.values())):
            address = "127.0.0.1"
        else:
            own = {h.name: rendezvous.guess_address(h, node_facts[h.name], spec.network.interface) for h in hosts}
            routes = ask_routes(sessions, {first.name: _list_others(own, first)})
            address = _choose_master(spec, first, own, routes[first.name])
        listen: ListenArguments = {"port": port, "nonce": nonce, "seconds": _PORT_TIMEOUT_S + _MARGIN_S}
        port = LISTEN.call(sessions[first.name], listen)["port"]
    except ClusterctlError as error:
        failed = {"address": address, "port": port, "role": "listen", "ok": False, "error": str(error)}
        return {first.name: failed}
    others = {host.name: sessions[host.name] for host in hosts[1:]}
    answers, errors = call_all(
        others, lambda _node, session: _connect(session, address, port, nonce, timeout_s=_PORT_TIMEOUT_S)
    )
    # Stop listening, so that the port is free for its next user.
    with contextlib.suppress(ClusterctlError):
        UNLISTEN.call(sessions[first.name], {"nonce": nonce})
    shared = {"address": address, "port": port}
    results: dict[str, dict[str, Any]] = {
        node: {
            **shared,
            "role": "connect",
            "listener": first.name,
            **(answers.get(node) or {"ok": False, "ms": None, "error": str(errors[node])}),
        }
        for node in others
    }
    reached = sum(result["ok"] for result in results.values())
    own_result = {"role": "listen", "ok": True, "error": None, "peers": len(others), "reached_by": reached}
    return {first.name: {**shared, **own_result}, **results}


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """A connection to try from `origin` to `peer`. A failure is reported as a problem of the node `reported_on`."""

    origin: str
    peer: str
    reported_on: str


def plan_link_probes(workers: Sequence[str], spares: Sequence[str]) -> list[LinkProbe]:
    """Return the connections to try: from each worker node to the next, and between each spare and one worker node.

    A failure between a spare and a worker is reported as a problem of the spare.
    """
    count = len(workers)
    ring = [LinkProbe(node, workers[(at + 1) % count], node) for at, node in enumerate(workers) if count > 1]
    pairs = [(spare, workers[at % count]) for at, spare in enumerate(spares) if count]
    return [*ring, *(LinkProbe(a, b, spare) for spare, worker in pairs for a, b in ((spare, worker), (worker, spare)))]


def probe_links(
    spec: ClusterSpec, sessions: Mapping[str, Session], rendezvous: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Try the links between nodes. Return the results by node, for `facts["controller"]["ring"]` of the node.

    Args:
        spec: The spec of the cluster file.
        sessions: The sessions by node.
        rendezvous: The result of `probe_rendezvous_port`, which gives the address of each node. Nodes that failed in
            that probe are left out.
    """
    at = _list_addresses(spec, rendezvous)
    planned = plan_link_probes(
        [h.name for h in spec.worker_hosts if h.name in at], [h.name for h in spec.spare_hosts if h.name in at]
    )
    nonce = secrets.token_hex(16)
    peers = Counter(probe.peer for probe in planned)

    def listen(node: str, session: Session) -> int:
        question: ListenArguments = {
            "port": 0,
            "nonce": nonce,
            "seconds": _EXCHANGE_TIMEOUT_S + _MARGIN_S,
            "payload": _PAYLOAD_BYTES,
            "enough": peers[node],
        }
        return LISTEN.call(session, question)["port"]

    ports, deaf = call_all({node: sessions[node] for node in peers}, listen)

    def connect(probe: LinkProbe, session: Session) -> ConnectAnswer:
        peer = probe.peer
        if peer in deaf:
            return {"ok": None, "error": f"{peer} did not listen: {deaf[peer]}"}
        return _connect(session, at[peer], ports[peer], nonce, timeout_s=_EXCHANGE_TIMEOUT_S, payload=_PAYLOAD_BYTES)

    answers, errors = call_all({probe: sessions[probe.origin] for probe in planned}, connect)
    results: dict[str, list[dict[str, Any]]] = {}
    for probe in planned:
        answer = answers.get(probe) or {"ok": None, "error": str(errors[probe])}
        result = {"from": probe.origin, "to": probe.peer, "address": at[probe.peer], "port": ports.get(probe.peer)}
        results.setdefault(probe.reported_on, []).append({**result, **answer})
    return results


def _list_addresses(spec: ClusterSpec, rendezvous: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the address that the plan will choose for each node."""
    given = {host.name: host.internal_ip for host in spec.hosts}
    own = {n: seen["address"] if seen.get("role") == "listen" else seen.get("source") for n, seen in rendezvous.items()}
    usable = {node: given.get(node) or own[node] for node, seen in rendezvous.items() if seen["ok"]}
    return {node: address for node, address in usable.items() if address}
