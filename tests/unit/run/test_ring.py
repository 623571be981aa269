"""Which ways between nodes are tried before a run, and against whom each counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.run.nodes.ring import Way, ways


@pytest.mark.parametrize(
    ("workers", "spares", "expected"),
    [
        ([], [], []),
        (["a"], [], []),
        (["a", "b"], [], [Way("a", "b", "a"), Way("b", "a", "b")]),
        (["a", "b", "c"], [], [Way("a", "b", "a"), Way("b", "c", "b"), Way("c", "a", "c")]),
        (["a"], ["s"], [Way("s", "a", "s"), Way("a", "s", "s")]),
        ([], ["s", "t"], []),
    ],
    ids=["nobody", "one node", "two", "three", "a spare beside one", "spares alone"],
)
def test_the_ways_are(workers: list[str], spares: list[str], expected: list[Way]) -> None:
    assert ways(workers, spares) == expected


@given(st.integers(0, 30), st.integers(0, 30))
def test_each_node_that_has_a_worker_beside_it_is_tried_both_ways_and_no_spare_counts_against_a_worker(
    workers: int, spares: int
) -> None:
    names, extra = [f"w{i}" for i in range(workers)], [f"s{i}" for i in range(spares)]
    found = ways(names, extra)
    assert len(found) == len({(way.origin, way.peer) for way in found})
    assert all(way.origin != way.peer for way in found)
    if workers and workers + spares > 1:
        both = {*extra, *(names if workers > 1 else [])}
        assert both <= {way.origin for way in found}
        assert both <= {way.peer for way in found}
    assert all(way.blamed in extra for way in found if {way.origin, way.peer} & set(extra))
    assert len(found) <= workers + 2 * spares
