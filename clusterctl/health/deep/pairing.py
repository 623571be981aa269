"""Plans which nodes to measure together."""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[str, str]
"""Two nodes, in the order of the cluster file."""
PairRound = tuple[Pair, ...]
"""Pairs without a common node, so that they can be measured at the same time."""


def pair_rounds(nodes: Sequence[str], *, all_pairs: bool) -> list[PairRound]:
    """Return rounds of pairs, by the circle method of round-robin tournaments.

    Args:
        nodes: Names of the nodes.
        all_pairs: Whether each pair occurs once, which finds every bad link. Otherwise each node gets two different
            partners (in two rounds, in three for an odd number of nodes), which finds a bad node.
    """
    if len(nodes) < 2:
        return []
    seats: list[str | None] = [*nodes, None] if len(nodes) % 2 else [*nodes]
    half, order = len(seats) // 2, {node: index for index, node in enumerate(nodes)}
    needed = len(seats) - 1 if all_pairs else min(len(seats) - 1, 2 + len(nodes) % 2)
    rounds: list[PairRound] = []
    for _ in range(needed):
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        pairs = [sorted((a, b), key=order.__getitem__) for a, b in opposite if a is not None and b is not None]
        rounds.append(tuple((a, b) for a, b in pairs))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
