"""Plans which nodes to measure together, and blames a node, a link or nobody for slow pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median, median_high

from clusterctl.health.deep.limits import Limits, estimate_deviation
from clusterctl.health.deep.measurements import Measure, Measurement

Pair = tuple[str, str]
"""Two nodes, in the order of the cluster file."""
PairRound = tuple[Pair, ...]
"""Pairs without a common node, so that they can be measured at the same time."""

_WITNESSES = 3
"""A node is certainly bad if it is slow with this many nodes that are fast with others."""
_FEWEST_FOR_CERTAINTY = 4
"""With fewer nodes that are fast with others, nobody knows how much healthy pairs differ on this network."""


class Certainty(str, Enum):
    """How sure a blame is. LIKELY: another explanation remains, or the difference is small."""

    CERTAIN = "certain"
    LIKELY = "likely"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What explains the slow pairs.

    Attributes:
        reference: The speed of a healthy pair; `None` for fewer than three nodes.
        deviation: The standard deviation of healthy pairs.
        nodes: Bad nodes.
        links: Bad links between two nodes that are fast with others.
        undecided: Slow pairs that neither a bad node nor a bad link explains.
        fast: Pairs that are much faster than `reference`. If there are any, `reference` may be the speed of pairs with
            faults, and no blame is certain.
    """

    reference: float | None
    deviation: float = 0.0
    nodes: Mapping[str, Certainty]
    links: Mapping[Pair, Certainty]
    undecided: PairRound = ()
    fast: PairRound = ()

    @property
    def is_blind(self) -> bool:
        """Whether healthy pairs differ so much that a pair of half the speed would not stand out."""
        return self.reference is not None and not Limits().is_low(self.reference / 2, self.reference, self.deviation)


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


def blame(nodes: Sequence[str], measurements: Iterable[Measurement], limits: Limits) -> Blame:
    """Return who is to blame for slow pairs.

    A pair is as slow as the slower of its nodes and the link between them, so a fast pair clears both nodes. A node is
    bad if all its pairs are slow, at least two of them with cleared nodes. A link is bad if it is the only slow one
    of two cleared nodes. A blame is certain only after three such pairs of a node or two measurements of a link.

    Args:
        nodes: Names of the nodes.
        measurements: Measurements, of which only those of pairs count.
        limits: Which differences matter.
    """
    repeats: dict[Pair, list[float]] = {}
    order = {node: index for index, node in enumerate(nodes)}
    for entry in measurements:
        if entry.measure is Measure.PAIR_ALL_REDUCE and entry.value is not None and entry.members <= order.keys():
            first, second = sorted(entry.members, key=order.__getitem__)
            repeats.setdefault((first, second), []).append(entry.value)
    speeds = {pair: max(values) for pair, values in repeats.items()}
    reference, deviation = _find_reference(speeds, limits)
    if reference is None:
        return Blame(reference=None, nodes={}, links={})
    slow = {pair for pair, speed in speeds.items() if limits.is_low(speed, reference, deviation)}
    very_slow = {pair for pair, speed in speeds.items() if limits.is_very_low(speed, reference, deviation)}
    fast = tuple(pair for pair, speed in speeds.items() if limits.is_very_low(reference, speed, deviation))
    fast_nodes = {node for pair in speeds.keys() - slow for node in pair}
    may_be_certain = not fast and len(fast_nodes) >= _FEWEST_FOR_CERTAINTY
    slow_partners = {
        node: {other: pair for pair in slow if node in pair for other in pair if other != node} for node in nodes
    }
    bad_nodes: dict[str, Certainty] = {}
    for node in nodes:
        witnesses = {other: pair for other, pair in slow_partners[node].items() if other in fast_nodes}
        if node not in fast_nodes and len(witnesses) >= 2:
            sure = may_be_certain and len(witnesses) >= _WITNESSES and very_slow.issuperset(witnesses.values())
            bad_nodes[node] = Certainty.CERTAIN if sure else Certainty.LIKELY
    bad_links: dict[Pair, Certainty] = {}
    unexplained = sorted(
        (pair for pair in slow if not bad_nodes.keys() & set(pair)), key=lambda pair: (order[pair[0]], order[pair[1]])
    )
    for pair in unexplained:
        if all(node in fast_nodes and len(slow_partners[node].keys() - bad_nodes.keys()) == 1 for node in pair):
            sure = may_be_certain and len(repeats[pair]) >= 2 and pair in very_slow
            bad_links[pair] = Certainty.CERTAIN if sure else Certainty.LIKELY
    undecided = tuple(pair for pair in unexplained if pair not in bad_links)
    return Blame(
        reference=reference,
        deviation=deviation,
        nodes=bad_nodes,
        links=bad_links,
        undecided=undecided,
        fast=fast,
    )


def _find_reference(speeds: Mapping[Pair, float], limits: Limits) -> tuple[float | None, float]:
    """Return the speed of healthy pairs and its standard deviation; `None` for fewer than three nodes."""
    by_node: dict[str, list[float]] = {}
    for pair, speed in speeds.items():
        for node in pair:
            by_node.setdefault(node, []).append(speed)
    # The higher median, so that one bad partner of two does not make a node slow.
    levels = {node: median_high(own) for node, own in by_node.items()}
    if len(levels) < 3:
        return None, 0.0
    middle, deviation = median(levels.values()), estimate_deviation(levels.values())
    sound = {node for node, level in levels.items() if not limits.is_low(level, middle, deviation)}
    inner = [speed for pair, speed in speeds.items() if sound.issuperset(pair)] or [middle]
    return median(inner), estimate_deviation(inner)


def halve_nodes(nodes: Sequence[str]) -> list[list[tuple[str, ...]]]:
    """Return all nodes, their halves, the halves of these, and so on: rounds of groups of more than two nodes.

    The groups of a round have no common node, so that they can be measured at the same time.

    Args:
        nodes: Names of the nodes. Neighbours should share switches.
    """
    rounds, groups = [], [tuple(nodes)]
    while groups := [group for group in groups if len(group) > 2]:  # Pairs have rounds of their own.
        rounds.append(groups)
        groups = [half for group in groups for half in (group[: len(group) // 2], group[len(group) // 2 :])]
    return rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGroup:
    """The smallest group of nodes that is slow together, while its pairs are fast.

    Attributes:
        nodes: The nodes.
        is_ambiguous: Both halves are slow: nobody can tell which part causes it.
    """

    nodes: tuple[str, ...]
    is_ambiguous: bool = False


def find_slow_group(nodes: Sequence[str], rates: Mapping[frozenset[str], float], least: float) -> SlowGroup | None:
    """Return the smallest slow group of `halve_nodes`; `None` if all nodes together are fast.

    Args:
        nodes: All nodes, in the order in which they were halved.
        rates: The bus bandwidth of each measured group.
        least: The rate below which a group is slow.
    """
    smallest: SlowGroup | None = None
    for groups in halve_nodes(nodes):
        halves = [group for group in groups if smallest is None or set(group) <= set(smallest.nodes)]
        halves = [group for group in halves if rates.get(frozenset(group), least) < least]
        if len(halves) != 1:
            return None if smallest is None else SlowGroup(nodes=smallest.nodes, is_ambiguous=bool(halves))
        smallest = SlowGroup(nodes=halves[0])
    return smallest
