"""Chooses the neighbours of a peer, and the pieces that it requests from each. Pure: no I/O, no clock.

A peer requests one piece at a time from each neighbour, and chooses the next piece when the last has arrived. So a
neighbour serves as much as its measured speed allows, and a slow one delays one piece only.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

_MIN_PATIENCE_S = 1.0
_PATIENCE_IN_DURATIONS = 3.0
"""If a request takes this many times the usual duration, another neighbour may be asked for the same piece."""
_WEIGHT = 0.2
"""The weight of the newest duration in the usual duration."""


def list_neighbours(own: int, others: Iterable[int]) -> list[int]:
    """Return the neighbours of a peer: on a ring of all peers, those at the distances 1, 2, 4, … to both sides.

    So a peer has about 2 log2(n) neighbours, a piece reaches every peer in log2(n) steps, and two peers are neighbours
    of each other. `others` are the other peers that may live. If a peer dies, the ring closes over its place.
    """
    ring = sorted({own, *others})
    at, distance, found = ring.index(own), 1, dict[int, None]()
    while distance < len(ring):
        found.update(dict.fromkeys((ring[(at + distance) % len(ring)], ring[at - distance])))
        distance *= 2
    found.pop(own, None)
    return list(found)


class PieceChoice:
    """The pieces that a peer lacks, those that its neighbours have, and the open requests.

    Attributes:
        missing: The pieces that this peer lacks.
    """

    def __init__(self, missing: Iterable[int]) -> None:
        self.missing = set(missing)
        self._offers: dict[int, set[int]] = {}
        self._copies: Counter[int] = Counter()
        self._requests: dict[int, dict[int, float]] = {}
        self._usual_s = 0.0

    def add_offer(self, neighbour: int, pieces: Iterable[int]) -> None:
        """Record that a neighbour has these pieces."""
        offered = self._offers.setdefault(neighbour, set())
        new = self.missing.intersection(pieces) - offered
        offered |= new
        self._copies.update(new)

    def remove_neighbour(self, neighbour: int) -> None:
        """Forget what a neighbour has, and the requests to it, which may then go to another neighbour."""
        self._copies.subtract(self._offers.pop(neighbour, ()))
        for piece in [piece for piece, asked in self._requests.items() if asked.pop(neighbour, None) is not None]:
            if not self._requests[piece]:
                del self._requests[piece]

    def choose_piece(self, neighbour: int, now: float, chance: random.Random) -> int | None:
        """Choose the piece to request from a neighbour, and record the request. `None`: request none now.

        The choice is the piece that the fewest neighbours have, or one of these by chance. If every piece that the
        neighbour has is requested elsewhere, the choice is one whose request is overdue.
        """
        offered = self._offers.get(neighbour, set()) & self.missing
        candidates = offered - self._requests.keys()
        if candidates:
            fewest = min(self._copies[piece] for piece in candidates)
            chosen = chance.choice(sorted(piece for piece in candidates if self._copies[piece] == fewest))
        else:
            patience_s = max(_MIN_PATIENCE_S, self._usual_s * _PATIENCE_IN_DURATIONS)
            asked = {piece: self._requests[piece] for piece in offered if neighbour not in self._requests[piece]}
            overdue = {p: max(at.values()) for p, at in asked.items() if now - max(at.values()) > patience_s}
            if not overdue:
                return None
            chosen = min(overdue, key=lambda piece: (overdue[piece], piece))
        self._requests.setdefault(chosen, {})[neighbour] = now
        return chosen

    def finish_piece(self, piece: int, neighbour: int | None, now: float) -> None:
        """Record that a piece has arrived from a neighbour, or from the head (`None`)."""
        asked = self._requests.pop(piece, {})
        self.missing.discard(piece)
        if neighbour in asked:
            took = now - asked[neighbour]
            self._usual_s = took if not self._usual_s else (1 - _WEIGHT) * self._usual_s + _WEIGHT * took
