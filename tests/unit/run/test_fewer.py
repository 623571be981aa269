"""With how few nodes a run may begin."""

from __future__ import annotations

import pytest

from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec, Role
from clusterctl.plan.layout import demote_to_spares

HOSTS = (
    *(HostSpec(name=name, host=name) for name in ("a", "b", "c")),
    HostSpec(name="s", host="s", role=Role.SPARE),
)


def spec(min_nodes: int | None) -> ClusterSpec:
    return ClusterSpec(name="run", path="", hosts=HOSTS, job=JobSpec(script="train.py"), min_nodes=min_nodes)


@pytest.mark.parametrize(
    ("min_nodes", "missing", "workers"),
    [
        pytest.param(2, ["b"], ["a", "c"], id="just enough are left"),
        pytest.param(1, ["a", "b"], ["c"], id="more than enough are left"),
        pytest.param(3, ["b"], None, id="too few are left"),
        pytest.param(None, ["b"], None, id="nobody allowed to begin with fewer"),
    ],
)
def test_a_run_begins_without_workers_only_where_enough_are_left(
    min_nodes: int | None, missing: list[str], workers: list[str] | None
) -> None:
    fewer = demote_to_spares(spec(min_nodes), missing)

    assert (None if fewer is None else [host.name for host in fewer.worker_hosts]) == workers


def test_a_worker_that_is_missing_waits_as_the_spares_do() -> None:
    fewer = demote_to_spares(spec(2), ["b"])

    assert fewer is not None
    assert [host.name for host in fewer.spare_hosts] == ["b", "s"]
