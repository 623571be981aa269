"""A cast to up to 1,000 nodes, simulated: the choices are those of the real peers and of the real head.

Each machine sends and receives at the same rate at most, and divides it evenly among its transfers; a message takes no
time. The unit of time is one piece over one link.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from typing import TYPE_CHECKING

from benchmarks.measures import Measure
from clusterctl.agent.cast.piece_choice import PieceChoice, list_neighbours
from clusterctl.run.rules.piece_giving import PieceGiving

if TYPE_CHECKING:
    from collections.abc import Iterable

SIZES = (8, 64, 256, 1000)
PIECES = 256
HEAD = -1
GIVERS = 64
ENDLESS_PATIENCE = 1e-9
"""Seconds in a unit of time: no request is overdue."""


class Transfer:
    """A piece on its way. `version` counts the changes of its rate."""

    def __init__(self, giver: int, taker: int, piece: int, now: float) -> None:
        self.giver, self.taker, self.piece = giver, taker, piece
        self.remaining, self.rate, self.since, self.version = 1.0, 0.0, now, 0


class Simulation:
    """One cast. `depths` has the steps from the head of every piece on every node."""

    def __init__(self, count: int, pieces: int, seed: int = 0) -> None:
        self.count, self.pieces, self._chance = count, pieces, random.Random(seed)
        self._near = [list_neighbours(own, [n for n in range(count) if n != own]) for own in range(count)]
        self._choices = [PieceChoice(range(pieces)) for _ in range(count)]
        self._giving = PieceGiving({str(n): set(range(pieces)) for n in range(count)}, 0.0)
        self._held: list[list[int]] = [[] for _ in range(count)]
        self._asked: list[set[int]] = [set() for _ in range(count)]
        self._known: list[Counter[int]] = [Counter() for _ in range(count)]
        self._depth: list[dict[int, int]] = [{} for _ in range(count)]
        self._sent: dict[int, set[Transfer]] = {n: set() for n in range(HEAD, count)}
        self._received: dict[int, set[Transfer]] = {n: set() for n in range(count)}
        self._events: list[tuple[float, int, int, Transfer]] = []
        self._numbers = itertools.count()
        self.now = 0.0
        self.head_sent = 0

    def run(self) -> None:
        """Run until every node has every piece."""
        self._give()
        while self._events:
            at, version, _, transfer = heapq.heappop(self._events)
            if version == transfer.version:
                self.now = at
                self._finish(transfer)
        assert all(len(held) == self.pieces for held in self._held)

    @property
    def depths(self) -> list[int]:
        return [depth for depths in self._depth for depth in depths.values()]

    def _finish(self, transfer: Transfer) -> None:
        giver, taker, piece = transfer.giver, transfer.taker, transfer.piece
        self._sent[giver].remove(transfer)
        self._received[taker].remove(transfer)
        if piece not in self._depth[taker]:
            self._depth[taker][piece] = 1 if giver == HEAD else self._depth[giver][piece] + 1
            self._held[taker].append(piece)
        self._choices[taker].finish_piece(piece, None if giver == HEAD else giver, self.now * ENDLESS_PATIENCE)
        self._giving.add_pieces(str(taker), [piece], 0.0)
        self._asked[taker].discard(giver)
        for near in (*(() if giver == HEAD else (giver,)), *self._near[taker]):
            self._ask(taker, near)
            self._ask(near, taker)
        self._give()
        self._share(giver, taker)

    def _ask(self, own: int, near: int) -> None:
        """Let a node ask a neighbour for its next piece, unless it waits for one of it already."""
        choice = self._choices[own]
        if near in self._asked[own] or not choice.missing or own == near:
            return
        choice.add_offer(near, self._held[near][self._known[own][near] :])
        self._known[own][near] = len(self._held[near])
        piece = choice.choose_piece(near, self.now * ENDLESS_PATIENCE, self._chance)
        if piece is not None:
            self._asked[own].add(near)
            self._start(near, own, piece)

    def _give(self) -> None:
        while True:
            busy = {str(transfer.taker) for transfer in self._sent[HEAD]}
            if len(busy) >= GIVERS or (gift := self._giving.choose_gift(0.0, busy)) is None:
                return
            self.head_sent += 1
            self._start(HEAD, int(gift[0]), gift[1])

    def _start(self, giver: int, taker: int, piece: int) -> None:
        transfer = Transfer(giver, taker, piece, self.now)
        self._sent[giver].add(transfer)
        self._received[taker].add(transfer)
        self._share(giver, taker)

    def _share(self, giver: int, taker: int) -> None:
        """Compute the rates of all transfers of two machines anew."""
        for transfer in self._sent[giver] | self._received[taker]:
            rate = 1 / max(len(self._sent[transfer.giver]), len(self._received[transfer.taker]))
            if rate != transfer.rate:
                transfer.remaining -= (self.now - transfer.since) * transfer.rate
                transfer.rate, transfer.since, transfer.version = rate, self.now, transfer.version + 1
                end = self.now + max(0.0, transfer.remaining) / rate
                heapq.heappush(self._events, (end, transfer.version, next(self._numbers), transfer))


def measure(_rounds: int) -> Iterable[Measure]:
    """Yield the time of casts of 1 GiB to clusters of several sizes, as ratios to sending the pieces once."""
    for count in SIZES:
        simulation = Simulation(count, PIECES)
        simulation.run()
        depths = simulation.depths
        yield Measure(
            name=f"cast of {PIECES} pieces to {count} simulated nodes / once",
            value=simulation.now / PIECES,
            goal=1.6,
            detail=f"depth at most {max(depths)}, {sum(depths) / len(depths):.1f} on average; "
            f"the head sent {simulation.head_sent / PIECES:.2f} times the content",
        )
