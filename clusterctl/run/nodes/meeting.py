"""Where the workers of a run meet: what the nodes told of their addresses, and the routes between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.commands import Command
from clusterctl.errors import RefusedError
from clusterctl.plan import launch as planning
from clusterctl.run.nodes.links import each, raise_first

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.session.conversation import Session

_CALL_SECONDS = 60.0


def answer_of(host: HostSpec, hello: Mapping[str, Any]) -> planning.NodeAnswer:
    """Return what planning needs of a node's hello."""
    addresses = tuple(
        (a["interface"], a["address"]) for a in hello.get("addresses", []) if a.get("up") and not a.get("loopback")
    )
    return planning.NodeAnswer(
        node=host.name,
        addresses=addresses,
        reached_at=hello.get("reached_at"),
        gpus=(hello.get("gpus") or {}).get("count"),
        vendor=(hello.get("gpus") or {}).get("vendor"),
        cores=int(hello.get("cores") or 1),
        place=(hello.get("boot_id", ""), hello.get("net_ns", "")),
        rdma=bool(hello.get("rdma")),
    )


def master_of(
    spec: ClusterSpec,
    hosts: Sequence[HostSpec],
    answers: Mapping[str, planning.NodeAnswer],
    sessions: Mapping[str, Session],
) -> str:
    """Return the address of the first host on the routes from the others, who share no loopback with it.

    Raises:
        RefusedError: It has none that they could reach, or the interface that the file names is not there.
        NodeError: It could not be asked.
    """
    interface = spec.network.interface
    first, others = hosts[0], hosts[1:]
    addresses = {h.name: planning.provisional_address(h, answers[h.name], interface) for h in hosts}
    wanted = [a for h in others if (a := addresses[h.name])]
    routes = ask_routes(sessions, {first.name: wanted})[first.name]
    master = planning.master_address(first, addresses[first.name], [routes.get(a) for a in wanted])
    if interface and not first.internal_ip:
        master = addresses[first.name]
    if master is None:
        raise RefusedError(
            f"{first.name} has no address that other nodes could reach",
            hint="set `internal_ip` of its host, or `network.interface`",
        )
    return master


def ask_routes(
    sessions: Mapping[str, Session], targets: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, planning.Route | None]]:
    """Return how each node of `targets` reaches the addresses named for it; no packet is sent for it.

    Raises:
        NodeError, NodesError: Some could not be asked.
    """

    def ask(node: str, session: Session) -> dict[str, planning.Route | None]:
        answer = session.call(Command.ROUTES, {"targets": list(targets[node])}, timeout=_CALL_SECONDS)["routes"]
        return {
            t: planning.Route(source=r["source"], interface=r["interface"]) if r else None for t, r in answer.items()
        }

    found, errors = each({node: sessions[node] for node in targets}, ask)
    raise_first(errors)
    return found


def meeting_addresses(spec: ClusterSpec, sessions: Mapping[str, Session]) -> dict[str, str]:
    """Return where each node will probably be met by the others; none for a node that tells no address."""
    hosts = [h for h in spec.hosts if h.name in sessions]
    answers = {h.name: answer_of(h, sessions[h.name].hello) for h in hosts}
    if answers and planning.share_loopback(list(answers.values())):
        return dict.fromkeys(answers, "127.0.0.1")
    found = {h.name: _address(spec, h, answers[h.name]) for h in hosts}
    return {node: address for node, address in found.items() if address}


def _address(spec: ClusterSpec, host: HostSpec, answer: planning.NodeAnswer) -> str | None:
    try:
        return planning.provisional_address(host, answer, spec.network.interface)
    except RefusedError:
        return answer.reached_at
