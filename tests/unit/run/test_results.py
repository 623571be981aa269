"""When results are fetched, and what is said of nodes from which they did not come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.config.field_types import ResultsFetchCondition
from clusterctl.config.spec import ClusterSpec, ResultsSpec
from clusterctl.run.nodes.downloads import ResultsFetch, choose_results_to_fetch
from clusterctl.run.rules.state import RunPhase, RunState

RESULTS = ResultsSpec(patterns=("best*",), to="/no/such/place")
SPEC = ClusterSpec(name="r", path="/cluster.yaml", hosts=(), job=None, results=RESULTS)
BEGUN = RunState(placements=((0, "n1", (0,)),))


@pytest.mark.parametrize(
    ("when", "phase", "fetched"),
    [
        (ResultsFetchCondition.SUCCESS, RunPhase.SUCCEEDED, True),
        (ResultsFetchCondition.SUCCESS, RunPhase.FAILED, False),
        (ResultsFetchCondition.SUCCESS, RunPhase.CANCELLED, False),
        (ResultsFetchCondition.ALWAYS, RunPhase.FAILED, True),
        (ResultsFetchCondition.ALWAYS, RunPhase.CANCELLED, True),
        (ResultsFetchCondition.ALWAYS, RunPhase.LOST, True),
    ],
)
def test_results_are_fetched_after(when: ResultsFetchCondition, phase: RunPhase, fetched: bool) -> None:
    spec = replace(SPEC, results=replace(RESULTS, when=when))

    assert (choose_results_to_fetch(spec, BEGUN, phase) is not None) == fetched


def test_of_a_run_that_never_began_there_are_no_results() -> None:
    assert (
        choose_results_to_fetch(
            replace(SPEC, results=replace(RESULTS, when=ResultsFetchCondition.ALWAYS)), RunState(), RunPhase.FAILED
        )
        is None
    )


def test_a_node_that_is_not_connected_is_named_and_the_patterns_are_not() -> None:
    found = ResultsFetch(SPEC, RESULTS, "r-1").fetch({}, ["n1", "n2"])

    assert found.missing == ["n[1-2]: not connected"]
    assert (found.files, Path(found.to)) == (0, Path("/no/such/place/r-1"))
