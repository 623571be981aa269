"""The network between the nodes: the address of the rendezvous, and what the nodes can reach before there are workers.

NCCL and Gloo join ranks of all nodes at ports that the kernel picks, in both directions, with packets as large as the
interfaces allow. So each node also sends its neighbour data and gets it back: a few bytes at one port prove nothing.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterctl.agent.protocol import command_types
from clusterctl.agent.protocol.command_types import ConnectAnswer, HelloAnswer
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.errors import ClusterctlError, RefusedError
from clusterctl.plan import rendezvous
from clusterctl.plan.environment import choose_interface_variables
from clusterctl.plan.layout import NodeLayout
from clusterctl.run.nodes.fan_out import call_all, raise_first
from clusterctl.session.requests import CONNECT, LISTEN, ROUTES, UNLISTEN
from clusterctl.session.session import Session

CONNECT_SECONDS = 2.0
"""How long a node may take to reach the port; a firewall that drops packets is known by this time."""
_MARGIN = 4.0


def build_node_info(host: HostSpec, hello: HelloAnswer) -> rendezvous.NodeInfo:
    """Return what planning needs of a node's hello."""
    addresses = tuple(
        (a["interface"], a["address"]) for a in hello.get("addresses", []) if a.get("up") and not a.get("loopback")
    )
    return rendezvous.NodeInfo(
        node=host.name,
        addresses=addresses,
        reached_at=hello.get("reached_at"),
        gpus=(hello.get("gpus") or {}).get("count"),
        vendor=(hello.get("gpus") or {}).get("vendor"),
        cores=int(hello.get("cores") or 1),
        netns_id=(hello.get("boot_id", ""), hello.get("net_ns", "")),
        has_rdma=bool(hello.get("rdma")),
        login_env=hello.get("login") or {},
    )


def resolve_rendezvous(
    spec: ClusterSpec,
    entries: Sequence[NodeLayout],
    answers: Mapping[str, rendezvous.NodeInfo],
    sessions: Mapping[str, Session],
) -> rendezvous.Rendezvous:
    """Return where the workers of each node meet.

    All nodes are asked for their routes at once: node 0 for those to the others, they for those to where it seems to
    be. Where its own routes tell another address, the others are asked again, for that one.

    Raises:
        RefusedError: Some could not reach the others, or the interface that the file names is not there.
        NodeError, NodesError: Some could not be asked.
    """
    if rendezvous.can_use_loopback(list(answers.values())):
        return rendezvous.plan_loopback_rendezvous(entries)
    hosts = [entry.host for entry in entries]
    own = _own_addresses(spec, hosts, answers)
    first, others = hosts[0].name, [host.name for host in hosts[1:]]
    seeming = own[first]
    routes = ask_routes(
        sessions, {first: _list_known(own, others), **({n: [seeming] for n in others} if seeming else {})}
    )
    master = _choose_master(spec, hosts, own, routes[first])
    if master != seeming:
        routes |= ask_routes(sessions, {node: [master] for node in others})
    to_master = {node: routes[node].get(master) for node in others}
    if spec.network.interface:
        to_master = {n: rendezvous.Route(source=own[n] or "", interface=spec.network.interface) for n in others}
    return rendezvous.plan_rendezvous(entries, answers, master, to_master)


def _own_addresses(
    spec: ClusterSpec, hosts: Sequence[HostSpec], answers: Mapping[str, rendezvous.NodeInfo]
) -> dict[str, str | None]:
    return {h.name: rendezvous.guess_address(h, answers[h.name], spec.network.interface) for h in hosts}


def _list_known(own: Mapping[str, str | None], nodes: Sequence[str]) -> list[str]:
    return [address for node in nodes if (address := own[node])]


def _choose_master(
    spec: ClusterSpec,
    hosts: Sequence[HostSpec],
    own: Mapping[str, str | None],
    routes: Mapping[str, rendezvous.Route | None],
) -> str:
    """Return the address of the first host on its routes to the others, who share no loopback with it.

    Raises:
        RefusedError: It has none that they could reach.
    """
    first, others = hosts[0], [host.name for host in hosts[1:]]
    if spec.network.interface and not first.internal_ip:
        master = own[first.name]
    else:
        master = rendezvous.choose_master_address(
            first, own[first.name], [routes.get(a) for a in _list_known(own, others)]
        )
    if master is None:
        raise RefusedError(
            f"{first.name} has no address that other nodes could reach",
            hint="set `internal_ip` of its host, or `network.interface`",
        )
    return master


def ask_routes(
    sessions: Mapping[str, Session], targets: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, rendezvous.Route | None]]:
    """Return how each node of `targets` reaches the addresses named for it; no packet is sent for it.

    Raises:
        NodeError, NodesError: Some could not be asked.
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
    """Return where each node will probably be met by the others; none for a node that tells no address."""
    hosts = [h for h in spec.hosts if h.name in sessions]
    answers = {h.name: build_node_info(h, sessions[h.name].hello) for h in hosts}
    if answers and rendezvous.can_use_loopback(list(answers.values())):
        return dict.fromkeys(answers, "127.0.0.1")
    addresses = {h.name: _guess_address(spec, h, answers[h.name]) for h in hosts}
    return {node: address for node, address in addresses.items() if address}


def guess_interfaces(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, dict[str, str]]:
    """Return what ranks of each node will probably be told of interfaces, beside what `env` says."""
    hosts = [h for h in spec.hosts if h.name in sessions]
    answers = {h.name: build_node_info(h, sessions[h.name].hello) for h in hosts}
    routes = {
        node: "lo" if address == "127.0.0.1" else rendezvous.find_interface(answers[node], address)
        for node, address in guess_addresses(spec, sessions).items()
    }
    return choose_interface_variables(spec, hosts, answers, routes)


def _guess_address(spec: ClusterSpec, host: HostSpec, answer: rendezvous.NodeInfo) -> str | None:
    try:
        return rendezvous.guess_address(host, answer, spec.network.interface)
    except RefusedError:
        return answer.reached_at


def probe_rendezvous_port(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, dict[str, Any]]:
    """Return what each node saw of the port, as the key `rendezvous` of `facts["controller"]` has it.

    The first worker of the cluster file that was reached listens, on the port that the file names or on any free one,
    at the address that workers would be given. Returns nothing where fewer than two nodes were reached.
    """
    ordered = [h for h in (*spec.workers, *spec.spares) if h.name in sessions]
    if len(ordered) < 2:
        return {}
    first = ordered[0].name
    answers = {h.name: build_node_info(h, sessions[h.name].hello) for h in ordered}
    port = spec.network.master_port or 0
    nonce = secrets.token_hex(16)
    tried: dict[str, Any] = {"address": None, "port": port, "role": "listen", "ok": False, "error": None}
    try:
        together = rendezvous.can_use_loopback(list(answers.values()))
        tried["address"] = "127.0.0.1" if together else _choose_listener_address(spec, ordered, answers, sessions)
        request: command_types.ListenArguments = {"port": port, "nonce": nonce, "seconds": CONNECT_SECONDS + _MARGIN}
        tried["port"] = LISTEN.call(sessions[first], request)["port"]
    except ClusterctlError as error:
        return {first: {**tried, "error": str(error)}}
    others = _probe_port(first, tried, {h.name: sessions[h.name] for h in ordered[1:]}, nonce)
    # Whoever binds the port next must find it free.
    with contextlib.suppress(ClusterctlError):
        UNLISTEN.call(sessions[first], {"nonce": nonce})
    reached = sum(seen["ok"] for seen in others.values())
    return {first: {**tried, "ok": True, "peers": len(others), "reached_by": reached}, **others}


def _choose_listener_address(
    spec: ClusterSpec,
    hosts: Sequence[HostSpec],
    answers: Mapping[str, rendezvous.NodeInfo],
    sessions: Mapping[str, Session],
) -> str:
    own, first = _own_addresses(spec, hosts, answers), hosts[0].name
    routes = ask_routes(sessions, {first: _list_known(own, [host.name for host in hosts[1:]])})
    return _choose_master(spec, hosts, own, routes[first])


def _probe_port(
    first: str, tried: Mapping[str, Any], sessions: Mapping[str, Session], nonce: str
) -> dict[str, dict[str, Any]]:
    request: command_types.ConnectArguments = {
        "address": tried["address"],
        "port": tried["port"],
        "nonce": nonce,
        "timeout": CONNECT_SECONDS,
    }

    def connect(_node: str, session: Session) -> ConnectAnswer:
        return CONNECT.call(session, request, timeout=CONNECT_SECONDS + _MARGIN)

    answers, errors = call_all(sessions, connect)
    seen = answers | {node: {"ok": False, "ms": None, "error": str(error)} for node, error in errors.items()}
    shared = {"address": tried["address"], "port": tried["port"], "role": "connect", "listener": first}
    return {node: {**shared, **seen[node]} for node in sessions}


PAYLOAD_BYTES = 256 * 1024
"""Bytes each way: many packets of any size, and done in no time."""
EXCHANGE_SECONDS = 4.0
"""How long one exchange may take; two lost packets at its begin cost three."""
_LINK_MARGIN = 4.0


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """One connection to try: `origin` opens it to `peer`, and what is wrong with it counts against `reported_on`."""

    origin: str
    peer: str
    reported_on: str


def plan_link_probes(workers: Sequence[str], spares: Sequence[str]) -> list[LinkProbe]:
    """Return what to try: each worker and the next one, and each spare with one of them, there and back.

    A spare is in no worker's way: what is wrong between both is the spare's affair.
    """
    count = len(workers)
    ring = (
        [LinkProbe(node, workers[(place + 1) % count], node) for place, node in enumerate(workers)] if count > 1 else []
    )
    beside = [(spare, workers[place % count]) for place, spare in enumerate(spares)] if workers else []
    return [*ring, *(LinkProbe(a, b, spare) for spare, worker in beside for a, b in ((spare, worker), (worker, spare)))]


def probe_links(
    spec: ClusterSpec, sessions: Mapping[str, Session], rendezvous: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Return what was seen of each way, by the node it counts against, as `facts["controller"]["ring"]` has it.

    Args:
        spec: What is declared.
        sessions: Node name to session.
        rendezvous: What `try_port` returned: it tells at which address each node is met by the others. Nodes that did
            not come through there are left out.
    """
    at = _list_addresses(spec, rendezvous)
    planned = plan_link_probes(
        [h.name for h in spec.workers if h.name in at], [h.name for h in spec.spares if h.name in at]
    )
    nonce = secrets.token_hex(16)
    peers = Counter(way.peer for way in planned)

    def listen(node: str, session: Session) -> int:
        request: command_types.ListenArguments = {
            "port": 0,
            "nonce": nonce,
            "seconds": EXCHANGE_SECONDS + _LINK_MARGIN,
            "payload": PAYLOAD_BYTES,
            "enough": peers[node],
        }
        return LISTEN.call(session, request)["port"]

    ports, deaf = call_all({node: sessions[node] for node in peers}, listen)
    by_key = {f"{way.origin} {way.peer}": way for way in planned}

    def connect(key: str, session: Session) -> ConnectAnswer:
        peer = by_key[key].peer
        if peer in deaf:
            return {"ok": None, "error": f"{peer} was not heard: {deaf[peer]}"}
        request: command_types.ConnectArguments = {
            "address": at[peer],
            "port": ports[peer],
            "nonce": nonce,
            "timeout": EXCHANGE_SECONDS,
            "payload": PAYLOAD_BYTES,
        }
        return CONNECT.call(session, request, timeout=EXCHANGE_SECONDS + _LINK_MARGIN)

    answers, errors = call_all({key: sessions[way.origin] for key, way in by_key.items()}, connect)
    seen: dict[str, list[dict[str, Any]]] = {}
    for key, way in by_key.items():
        told = answers.get(key) or {"ok": None, "error": str(errors[key])}
        entry = {"from": way.origin, "to": way.peer, "address": at[way.peer], "port": ports.get(way.peer), **told}
        seen.setdefault(way.reported_on, []).append(entry)
    return seen


def _list_addresses(spec: ClusterSpec, rendezvous: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return where each node is met: as the plan will have it, by the way that it has just been on."""
    given = {host.name: host.internal_ip for host in spec.hosts}
    own = {n: seen["address"] if seen.get("role") == "listen" else seen.get("source") for n, seen in rendezvous.items()}
    usable = {node: given.get(node) or own[node] for node, seen in rendezvous.items() if seen["ok"]}
    return {node: address for node, address in usable.items() if address}
