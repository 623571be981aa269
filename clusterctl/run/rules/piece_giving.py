"""Decides which piece of a cast the head gives to which node. Pure: time is an argument.

The head gives each piece to one node, the one with the fewest pieces under way; the nodes pass it on. The head gives a
piece again only if no living node has it any more, or to a node that gets nothing from other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

_WINDOW = 2
"""The pieces that may be under way to a node at once: one fills the connection while the node stores the other."""
_STARVED_S = 10.0
"""After this time without a piece from another node, a node gets its pieces from the head."""


class PieceGiving:
    """The pieces that each living node lacks and has, and those under way from the head.

    Args:
        missing: The pieces that each node needs.
        now: The present time in seconds.

    Attributes:
        missing: The pieces that each living node lacks.
        fed: The nodes to which the head gave a piece that another node had.
    """

    def __init__(self, missing: Mapping[str, Set[int]], now: float) -> None:
        self.missing = {node: set(pieces) for node, pieces in missing.items()}
        self.fed: set[str] = set()
        self._has: dict[str, set[int]] = {node: set() for node in missing}
        self._under_way: dict[str, set[int]] = {node: set() for node in missing}
        self._last_from_node = dict.fromkeys(missing, now)
        self._isolated: set[str] = set()
        # A dictionary keeps the order, so that the head reads its files from the beginning to the end.
        self._scarce = dict.fromkeys(sorted(set().union(*self.missing.values())))
        """The pieces that no living node has and that are not under way."""

    def is_under_way(self, node: str, pieces: Iterable[int]) -> bool:
        """Return whether one of these pieces is under way from the head to a node."""
        return not self._under_way.get(node, set()).isdisjoint(pieces)

    def add_pieces(self, node: str, pieces: Iterable[int], now: float) -> set[int]:
        """Record that a node has these pieces; return those that it lacked."""
        if node not in self.missing:
            return set()
        new = self.missing[node].intersection(pieces)
        self._has[node].update(pieces)
        if not self._under_way[node].issuperset(new):
            self._last_from_node[node] = now
        self._under_way[node] -= new
        self.missing[node] -= new
        for piece in self._scarce.keys() & set(pieces):
            del self._scarce[piece]
        return new

    @property
    def has_scarce_pieces(self) -> bool:
        """Whether a node lacks a piece that no living node has, and that is not under way."""
        return bool(self._scarce)

    def set_isolated(self, node: str, *, is_isolated: bool) -> None:
        """Record whether a node can reach no other node."""
        (self._isolated.add if is_isolated else self._isolated.discard)(node)

    def remove_node(self, node: str) -> None:
        """Record that a node is lost. The pieces that only this node had become scarce."""
        if node not in self.missing:
            return
        lost = self._has.pop(node) | self._under_way.pop(node)
        del self.missing[node]
        safe = set().union(*self._has.values(), *self._under_way.values())
        wanted = set().union(*self.missing.values())
        self._scarce = dict.fromkeys(sorted((self._scarce.keys() | (lost - safe)) & wanted))

    def choose_gift(self, now: float, busy: Set[str] = frozenset()) -> tuple[str, int] | None:
        """Choose a node and the piece to give it, and record that it is under way. `None`: give nothing now.

        Args:
            now: The present time in seconds.
            busy: The nodes to which the head is sending a piece.
        """
        free = sorted(
            (
                node
                for node, pieces in self._under_way.items()
                if len(pieces) < _WINDOW and self.missing[node] and node not in busy
            ),
            key=lambda node: len(self._under_way[node]),
        )
        if not free:
            return None
        for piece in self._scarce:
            for node in free:
                if piece in self.missing[node]:
                    del self._scarce[piece]
                    self._under_way[node].add(piece)
                    return node, piece
        for node in free:
            if node in self._isolated or now - self._last_from_node[node] > _STARVED_S:
                piece = min(self.missing[node] - self._under_way[node], default=-1)
                if piece >= 0:
                    self.fed.add(node)
                    self._under_way[node].add(piece)
                    return node, piece
        return None
