"""Pairs of nodes: who is measured with whom."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from clusterctl.health.deep.pairing import pair_rounds


def names(count: int) -> list[str]:
    return [f"n{index:02}" for index in range(count)]


@pytest.mark.parametrize("count", range(65))
def test_all_rounds_measure_each_pair_once(count: int) -> None:
    rounds = pair_rounds(names(count), all_pairs=True)

    assert sorted(chain(*rounds)) == list(combinations(names(count), 2))
    assert all(len(set(chain(*pairs))) == 2 * len(pairs) for pairs in rounds)


@pytest.mark.parametrize("count", range(3, 65))
def test_few_rounds_give_each_node_two_partners(count: int) -> None:
    rounds = pair_rounds(names(count), all_pairs=False)

    pairs = list(chain(*rounds))
    assert len(rounds) == 2 + count % 2
    assert len(set(pairs)) == len(pairs)
    assert min(sum(node in pair for pair in pairs) for node in names(count)) >= 2
