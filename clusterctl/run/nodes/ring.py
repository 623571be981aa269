"""The ways between nodes, tried before there are workers: each sends its neighbour data and gets it back.

NCCL and Gloo join ranks of all nodes at ports that the kernel picks, in both directions, with packets as large as the
interfaces allow. That one node answers a few bytes at one port says nothing of it.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.run.nodes.fan_out import each
from clusterctl.session.requests import CONNECT, LISTEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.protocol.command_types import ConnectAnswer
    from clusterctl.config.spec import ClusterSpec
    from clusterctl.session.session import Session

PAYLOAD = 256 * 1024
"""Bytes each way: many packets of any size, and done in no time."""
SECONDS = 4.0
"""How long one exchange may take; two lost packets at its begin cost three."""
_MARGIN = 4.0


@dataclass(frozen=True, slots=True)
class Way:
    """One connection to try: `origin` opens it to `peer`, and what is wrong with it counts against `blamed`."""

    origin: str
    peer: str
    blamed: str


def ways(workers: Sequence[str], spares: Sequence[str]) -> list[Way]:
    """Return what to try: each worker and the next one, and each spare with one of them, there and back.

    A spare is in no worker's way: what is wrong between both is the spare's affair.
    """
    count = len(workers)
    ring = [Way(node, workers[(place + 1) % count], node) for place, node in enumerate(workers)] if count > 1 else []
    beside = [(spare, workers[place % count]) for place, spare in enumerate(spares)] if workers else []
    return [*ring, *(Way(a, b, spare) for spare, worker in beside for a, b in ((spare, worker), (worker, spare)))]


def try_ring(
    spec: ClusterSpec, sessions: Mapping[str, Session], rendezvous: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Return what was seen of each way, by the node it counts against, as `facts["controller"]["ring"]` has it.

    Args:
        spec: What is declared.
        sessions: Node name to session.
        rendezvous: What `try_port` returned: it tells at which address each node is met by the others. Nodes that did
            not come through there are left out.
    """
    at = _addresses(spec, rendezvous)
    planned = ways([h.name for h in spec.workers if h.name in at], [h.name for h in spec.spares if h.name in at])
    nonce = secrets.token_hex(16)
    peers = Counter(way.peer for way in planned)

    def listen(node: str, session: Session) -> int:
        return _listen(session, nonce, peers[node])

    ports, deaf = each({node: sessions[node] for node in peers}, listen)
    by_key = {f"{way.origin} {way.peer}": way for way in planned}

    def connect(key: str, session: Session) -> ConnectAnswer:
        peer = by_key[key].peer
        if peer in deaf:
            return {"ok": None, "error": f"{peer} was not heard: {deaf[peer]}"}
        return _connect(session, at[peer], ports[peer], nonce)

    answers, errors = each({key: sessions[way.origin] for key, way in by_key.items()}, connect)
    seen: dict[str, list[dict[str, Any]]] = {}
    for key, way in by_key.items():
        told = answers.get(key) or {"ok": None, "error": str(errors[key])}
        entry = {"from": way.origin, "to": way.peer, "address": at[way.peer], "port": ports.get(way.peer), **told}
        seen.setdefault(way.blamed, []).append(entry)
    return seen


def _listen(session: Session, nonce: str, peers: int) -> int:
    """Have a node wait for so many peers; return the port."""
    seconds = SECONDS + _MARGIN
    request: command_types.ListenArguments = {
        "port": 0,
        "nonce": nonce,
        "seconds": seconds,
        "payload": PAYLOAD,
        "enough": peers,
    }
    return LISTEN.call(session, request)["port"]


def _connect(session: Session, address: str, port: int, nonce: str) -> ConnectAnswer:
    """Have a node reach a peer, and send as much as shows what the way is good for."""
    request: command_types.ConnectArguments = {
        "address": address,
        "port": port,
        "nonce": nonce,
        "timeout": SECONDS,
        "payload": PAYLOAD,
    }
    return CONNECT.call(session, request, timeout=SECONDS + _MARGIN)


def _addresses(spec: ClusterSpec, rendezvous: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return where each node is met: as the plan will have it, by the way that it has just been on."""
    given = {host.name: host.internal_ip for host in spec.hosts}
    own = {n: seen["address"] if seen.get("role") == "listen" else seen.get("source") for n, seen in rendezvous.items()}
    usable = {node: given.get(node) or own[node] for node, seen in rendezvous.items() if seen["ok"]}
    return {node: address for node, address in usable.items() if address}
