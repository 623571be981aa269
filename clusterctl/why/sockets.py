"""What the connections between ranks tell: who waits to read from whom, and between which nodes nothing arrives."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.why.evidence import Connection, Node, RankSnapshot

_LOST = 2
"""So often a segment was sent again in vain: once may be chance."""
_LOOPBACK = ("127.", "::1")


def find_awaited_ranks(looks: Mapping[int, RankSnapshot], nodes: Mapping[int, str]) -> dict[int, int]:
    """Return from which rank each rank waits to read, where its main thread does and the other end is a rank's."""
    ends = {_key(one, nodes[rank]): rank for rank, look in looks.items() for one in look.sockets}
    found = {}
    for rank, look in looks.items():
        for one in look.sockets:
            other = ends.get(_key(one, nodes[rank], turned=True))
            if one.awaited and other is not None and other != rank and not one.unread:
                found[rank] = other
    return found


def find_broken_links(
    looks: Mapping[int, RankSnapshot], nodes: Mapping[int, str], known: Mapping[str, Node]
) -> list[tuple[str, str]]:
    """Return the pairs of nodes between which what ranks send is not acknowledged, the worst first."""
    by_address = {address: node.node for node in known.values() for address in node.addresses}
    ends = {_key(one, nodes[rank]): nodes[rank] for rank, look in looks.items() for one in look.sockets}
    lost: Counter[tuple[str, str]] = Counter()
    for rank, look in looks.items():
        for one in look.sockets:
            other = ends.get(_key(one, nodes[rank], turned=True)) or by_address.get(one.peer)
            if one.lost >= _LOST and other is not None and other != nodes[rank]:
                first, second = sorted((nodes[rank], other))
                lost[first, second] += one.lost
    return [pair for pair, _ in lost.most_common()]


def find_slowest_socket(
    looks: Mapping[int, RankSnapshot], nodes: Mapping[int, str], pair: tuple[str, str]
) -> Connection | None:
    """Return the connection from a rank of one of two nodes that has waited longest for an answer."""
    of_pair = [one for rank, look in looks.items() if nodes[rank] in pair for one in look.sockets]
    return max((one for one in of_pair if one.lost >= _LOST), key=lambda one: one.lost, default=None)


def _key(one: Connection, node: str, *, turned: bool = False) -> tuple[str, ...]:
    """Return both ends of a connection; what is within a machine is told apart by its node."""
    here, there = f"{one.address}:{one.port}", f"{one.peer}:{one.peer_port}"
    inside = node if one.peer.startswith(_LOOPBACK) else ""
    return (there, here, inside) if turned else (here, there, inside)
