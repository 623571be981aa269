"""Where the workers of a run meet: what the nodes told of their addresses, and the routes between them."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError, RefusedError
from clusterctl.plan import rendezvous
from clusterctl.plan.environment import choose_interface_variables
from clusterctl.run.nodes.fan_out import each, quietly, raise_first
from clusterctl.session.requests import CONNECT, LISTEN, ROUTES, UNLISTEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.protocol.command_types import ConnectAnswer, HelloAnswer
    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.plan.layout import NodeLayout
    from clusterctl.session.session import Session
CONNECT_SECONDS = 2.0
"""How long a node may take to reach the port; a firewall that drops packets is known by this time."""
_MARGIN = 4.0


def answer_of(host: HostSpec, hello: HelloAnswer) -> rendezvous.NodeInfo:
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


def meet(
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
    routes = ask_routes(sessions, {first: _known(own, others), **({n: [seeming] for n in others} if seeming else {})})
    master = _master(spec, hosts, own, routes[first])
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


def _known(own: Mapping[str, str | None], nodes: Sequence[str]) -> list[str]:
    return [address for node in nodes if (address := own[node])]


def _master(
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
        master = rendezvous.choose_master_address(first, own[first.name], [routes.get(a) for a in _known(own, others)])
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

    answered, errors = each({node: sessions[node] for node in targets}, ask)
    raise_first(errors)
    return answered


def meeting_addresses(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, str]:
    """Return where each node will probably be met by the others; none for a node that tells no address."""
    hosts = [h for h in spec.hosts if h.name in sessions]
    answers = {h.name: answer_of(h, sessions[h.name].hello) for h in hosts}
    if answers and rendezvous.can_use_loopback(list(answers.values())):
        return dict.fromkeys(answers, "127.0.0.1")
    addresses = {h.name: _address(spec, h, answers[h.name]) for h in hosts}
    return {node: address for node, address in addresses.items() if address}


def likely_interfaces(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, dict[str, str]]:
    """Return what ranks of each node will probably be told of interfaces, beside what `env` says."""
    hosts = [h for h in spec.hosts if h.name in sessions]
    answers = {h.name: answer_of(h, sessions[h.name].hello) for h in hosts}
    routes = {
        node: "lo" if address == "127.0.0.1" else rendezvous.find_interface(answers[node], address)
        for node, address in meeting_addresses(spec, sessions).items()
    }
    return choose_interface_variables(spec, hosts, answers, routes)


def _address(spec: ClusterSpec, host: HostSpec, answer: rendezvous.NodeInfo) -> str | None:
    try:
        return rendezvous.guess_address(host, answer, spec.network.interface)
    except RefusedError:
        return answer.reached_at


def try_port(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, dict[str, Any]]:
    """Return what each node saw of the port, as the key `rendezvous` of `facts["controller"]` has it.

    The first worker of the cluster file that was reached listens, on the port that the file names or on any free one,
    at the address that workers would be given. Returns nothing where fewer than two nodes were reached.
    """
    ordered = [h for h in (*spec.workers, *spec.spares) if h.name in sessions]
    if len(ordered) < 2:
        return {}
    first = ordered[0].name
    answers = {h.name: answer_of(h, sessions[h.name].hello) for h in ordered}
    port = spec.network.master_port or 0
    nonce = secrets.token_hex(16)
    tried: dict[str, Any] = {"address": None, "port": port, "role": "listen", "ok": False, "error": None}
    try:
        together = rendezvous.can_use_loopback(list(answers.values()))
        tried["address"] = "127.0.0.1" if together else _seen_from_others(spec, ordered, answers, sessions)
        request: command_types.ListenArguments = {"port": port, "nonce": nonce, "seconds": CONNECT_SECONDS + _MARGIN}
        tried["port"] = LISTEN.call(sessions[first], request)["port"]
    except ClusterctlError as error:
        return {first: {**tried, "error": str(error)}}
    others = _connect(first, tried, {h.name: sessions[h.name] for h in ordered[1:]}, nonce)
    # Whoever binds the port next must find it free.
    quietly(lambda: UNLISTEN.call(sessions[first], {"nonce": nonce}))
    reached = sum(seen["ok"] for seen in others.values())
    return {first: {**tried, "ok": True, "peers": len(others), "reached_by": reached}, **others}


def _seen_from_others(
    spec: ClusterSpec,
    hosts: Sequence[HostSpec],
    answers: Mapping[str, rendezvous.NodeInfo],
    sessions: Mapping[str, Session],
) -> str:
    own, first = _own_addresses(spec, hosts, answers), hosts[0].name
    routes = ask_routes(sessions, {first: _known(own, [host.name for host in hosts[1:]])})
    return _master(spec, hosts, own, routes[first])


def _connect(
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

    answers, errors = each(sessions, connect)
    seen = answers | {node: {"ok": False, "ms": None, "error": str(error)} for node, error in errors.items()}
    shared = {"address": tried["address"], "port": tried["port"], "role": "connect", "listener": first}
    return {node: {**shared, **seen[node]} for node in sessions}
