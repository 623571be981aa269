"""Pairs of nodes: who is measured with whom, and who is to blame for what is slow."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.health.deep.limits import Limits
from clusterctl.health.deep.measurements import Measure, Measurement
from clusterctl.health.deep.pairing import (
    Blame,
    Certainty,
    Pair,
    SlowGroup,
    blame,
    find_slow_group,
    halve_nodes,
    pair_rounds,
)

EXAMPLES = 2000 if os.environ.get("CLUSTERCTL_LONG") else 25


def names(count: int) -> list[str]:
    return [f"n{index:02}" for index in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 15, 64])
def test_all_rounds_measure_each_pair_once(count: int) -> None:
    rounds = pair_rounds(names(count), all_pairs=True)

    assert sorted(chain(*rounds)) == list(combinations(names(count), 2))
    assert all(len(set(chain(*pairs))) == 2 * len(pairs) for pairs in rounds)


@pytest.mark.parametrize("count", [3, 4, 5, 8, 15, 63, 64])
def test_few_rounds_give_each_node_two_partners(count: int) -> None:
    rounds = pair_rounds(names(count), all_pairs=False)

    pairs = list(chain(*rounds))
    assert len(rounds) == 2 + count % 2
    assert len(set(pairs)) == len(pairs)
    assert min(sum(node in pair for pair in pairs) for node in names(count)) >= 2


@dataclass(frozen=True)
class Fabric:
    """Nodes and links of a cluster; a share of the speed for each bad one."""

    count: int
    full: bool
    seed: int
    nodes: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[Pair, float] = field(default_factory=dict)

    def measure(self, pairs: Sequence[Pair], rnd: random.Random) -> list[Measurement]:
        """The bus bandwidth of pairs, which spreads by 3 % (standard deviation, cut at 8 %)."""
        return [
            Measurement(
                node=a,
                peers=(b,),
                measure=Measure.PAIR_ALL_REDUCE,
                value=47
                * min(self.nodes.get(a, 1), self.nodes.get(b, 1), self.links.get((a, b), 1))
                * min(1.08, max(0.92, rnd.gauss(1, 0.03))),
            )
            for a, b in pairs
        ]

    def blame(self) -> tuple[Blame, set[Pair]]:
        """Measure as the command does, and return the blame and all measured pairs."""
        pairs = [*chain(*pair_rounds(names(self.count), all_pairs=self.full or self.count <= 16))]
        found = self.measure(pairs * (2 if self.full else 1), random.Random(self.seed))
        return blame(names(self.count), found, Limits()), set(pairs)


@st.composite
def fabrics(draw: st.DrawFn, nodes: int = 0, links: int = 0, least: int = 2, highest: float = 0.97) -> Fabric:
    count = draw(st.integers(least, 64))
    shares = st.floats(0.1, highest)
    bad = draw(st.lists(st.sampled_from(names(count)), min_size=nodes, max_size=nodes, unique=True))
    ends = draw(st.lists(st.sampled_from(names(count)), min_size=2, max_size=2, unique=True)) if links else []
    return Fabric(
        count,
        draw(st.integers(0, 9)) == 0,  # All pairs of 64 nodes take long here.
        draw(st.integers(0, 2**32)),
        {node: draw(shares) for node in bad},
        {(min(ends), max(ends)): draw(shares)} if ends else {},
    )


@given(fabrics())
@settings(max_examples=EXAMPLES, deadline=None)
def test_healthy_nodes_are_not_blamed(fabric: Fabric) -> None:
    found, _ = fabric.blame()

    assert (found.nodes, found.links, found.undecided, found.fast) == ({}, {}, (), ())


@given(st.one_of(fabrics(nodes=1), fabrics(nodes=2), fabrics(links=1)))
@settings(max_examples=2 * EXAMPLES, deadline=None)
def test_no_innocent_is_blamed(fabric: Fabric) -> None:
    """A bad node that is slower by little may look like a bad link of this node, but not for certain."""
    found, _ = fabric.blame()

    assert found.nodes.keys() <= fabric.nodes.keys()
    assert all(pair in fabric.links or fabric.nodes.keys() & set(pair) for pair in found.links)
    assert {pair for pair, certainty in found.links.items() if certainty is Certainty.CERTAIN} <= fabric.links.keys()


@given(st.one_of(fabrics(nodes=1, highest=0.6, least=3), fabrics(nodes=2, highest=0.6, least=5)))
@settings(max_examples=EXAMPLES, deadline=None)
def test_bad_nodes_are_found_or_nobody_can_tell(fabric: Fabric) -> None:
    found, _ = fabric.blame()

    assert found.nodes.keys() == fabric.nodes.keys() or found.undecided or found.fast or found.is_blind


@given(fabrics(links=1, highest=0.6, least=3))
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_bad_link_that_was_measured_is_found_or_nobody_can_tell(fabric: Fabric) -> None:
    found, measured = fabric.blame()

    assert not fabric.links.keys() <= measured or found.links.keys() == fabric.links.keys() or found.undecided


@pytest.mark.parametrize("count", [3, 4, 5, 8, 16])
def test_one_slow_node_is_found_in_every_round_and_certain_among_five(count: int) -> None:
    certainty = Certainty.CERTAIN if count >= 5 else Certainty.LIKELY
    for seed in range(10):
        found, _ = Fabric(count, True, seed, nodes={"n01": 0.5}).blame()

        assert (found.nodes, found.links, found.undecided) == ({"n01": certainty}, {}, ())


def test_each_slow_link_of_28_is_certain() -> None:
    for seed, link in enumerate(combinations(names(8), 2)):
        found, _ = Fabric(8, True, seed, links={link: 0.5}).blame()

        assert (found.nodes, found.links, found.undecided) == ({}, {link: Certainty.CERTAIN}, ())


def measure_groups(everyone: Sequence[str], culprit: set[str]) -> dict[frozenset[str], float]:
    """A group is slow if it holds the whole culprit: some neighbours, such as those behind one bad uplink."""
    groups = chain(*halve_nodes(everyone))
    return {frozenset(group): 10.0 if culprit <= set(group) else 40.0 for group in groups}


@given(st.integers(3, 64), st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_halving_ends_at_the_smallest_slow_half(count: int, data: st.DataObject) -> None:
    everyone = names(count)
    first = data.draw(st.integers(0, count - 3))
    culprit = set(everyone[first : data.draw(st.integers(first + 3, count))])
    rates = measure_groups(everyone, culprit)

    found = find_slow_group(everyone, rates, least=20)

    assert found is not None
    assert set(found.nodes) == min((group for group, rate in rates.items() if rate < 20), key=len)
    assert not found.is_ambiguous


@pytest.mark.parametrize("count", [0, 2, 3, 16, 63])
def test_the_groups_of_a_round_have_no_common_node(count: int) -> None:
    rounds = halve_nodes(names(count))

    assert all(len(set(chain(*groups))) == sum(map(len, groups)) for groups in rounds)
    assert len(rounds) == {0: 0, 2: 0, 3: 1, 16: 3, 63: 5}[count]


def test_a_fast_fabric_has_no_slow_group() -> None:
    assert find_slow_group(names(8), {frozenset(names(8)): 40.0}, least=20) is None


def test_two_slow_halves_are_no_answer() -> None:
    rates = dict.fromkeys([frozenset(names(8)), frozenset(names(8)[:4]), frozenset(names(8)[4:])], 10.0)

    assert find_slow_group(names(8), rates, least=20) == SlowGroup(nodes=tuple(names(8)), is_ambiguous=True)
