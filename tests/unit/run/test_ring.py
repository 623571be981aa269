"""Which ways between nodes are tried before a run, and against whom each counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.run.nodes.network_probe import LinkProbe, plan_link_probes


@pytest.mark.parametrize(
    ("workers", "spares", "expected"),
    [
        ([], [], []),
        (["a"], [], []),
        (["a", "b"], [], [LinkProbe("a", "b", "a"), LinkProbe("b", "a", "b")]),
        (["a", "b", "c"], [], [LinkProbe("a", "b", "a"), LinkProbe("b", "c", "b"), LinkProbe("c", "a", "c")]),
        (["a"], ["s"], [LinkProbe("s", "a", "s"), LinkProbe("a", "s", "s")]),
        ([], ["s", "t"], []),
    ],
    ids=["nobody", "one node", "two", "three", "a spare beside one", "spares alone"],
)
def test_the_ways_are(workers: list[str], spares: list[str], expected: list[LinkProbe]) -> None:
    assert plan_link_probes(workers, spares) == expected


@given(st.integers(0, 30), st.integers(0, 30))
def test_each_node_that_has_a_worker_beside_it_is_tried_both_ways_and_no_spare_counts_against_a_worker(
    workers: int, spares: int
) -> None:
    names, extra = [f"w{i}" for i in range(workers)], [f"s{i}" for i in range(spares)]
    found = plan_link_probes(names, extra)
    assert len(found) == len({(way.origin, way.peer) for way in found})
    assert all(way.origin != way.peer for way in found)
    if workers and workers + spares > 1:
        both = {*extra, *(names if workers > 1 else [])}
        assert both <= {way.origin for way in found}
        assert both <= {way.peer for way in found}
    assert all(way.reported_on in extra for way in found if {way.origin, way.peer} & set(extra))
    assert len(found) <= workers + 2 * spares
