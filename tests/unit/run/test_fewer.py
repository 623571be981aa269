"""With how few nodes a run may begin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec, Role
from clusterctl.plan.layout import choose_nodes, choose_ready_nodes, demote_to_spares, move_to_end

HOSTS = (
    *(HostSpec(name=name, host=name) for name in ("a", "b", "c")),
    HostSpec(name="s", host="s", role=Role.SPARE),
)


def spec(min_nodes: int | None, nodes: tuple[int, int] | None = None) -> ClusterSpec:
    job = JobSpec(script="train.py", nodes=nodes)
    return ClusterSpec(name="run", path="", hosts=HOSTS, job=job, min_nodes=min_nodes)


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


@pytest.mark.parametrize(
    ("nodes", "avoided", "order"),
    [
        pytest.param((2, 2), ["a"], ["b", "c", "s", "a"], id="with a choice between hosts"),
        pytest.param(None, ["a"], ["a", "b", "c", "s"], id="all hosts are needed"),
        pytest.param(None, ["s"], ["a", "b", "c", "t", "s"], id="another spare comes first"),
        pytest.param((2, 2), ["a", "b", "c", "s"], ["a", "b", "c", "s"], id="all are alike"),
    ],
)
def test_avoided_hosts_are_taken_last_and_none_is_refused(
    nodes: tuple[int, int] | None, avoided: list[str], order: list[str]
) -> None:
    more = (HostSpec(name="t", host="t", role=Role.SPARE),) if "t" in order else ()
    before = replace(spec(None, nodes), hosts=(*HOSTS, *more))

    assert [host.name for host in move_to_end(before, avoided).hosts] == order


def test_a_worker_that_is_missing_waits_as_the_spares_do() -> None:
    fewer = demote_to_spares(spec(2), ["b"])

    assert fewer is not None
    assert [host.name for host in fewer.spare_hosts] == ["b", "s"]


@pytest.mark.parametrize(
    ("nodes", "busy", "workers"),
    [
        pytest.param(None, ["a"], ["a", "b", "c"], id="all"),
        pytest.param((2, 2), [], ["a", "b"], id="in the order of the file"),
        pytest.param((2, 2), ["a"], ["b", "c"], id="free ones first"),
        pytest.param((1, 3), ["b"], ["a", "c"], id="as many as are free"),
        pytest.param((2, 3), ["a", "c"], ["a", "b"], id="busy ones only where too few are free"),
    ],
)
def test_a_job_that_needs_some_of_the_hosts_takes(
    nodes: tuple[int, int] | None, busy: list[str], workers: list[str]
) -> None:
    chosen = choose_nodes(spec(nodes[0] if nodes else None, nodes), busy)

    assert [host.name for host in chosen.worker_hosts] == workers
    assert len(chosen.hosts) == len(HOSTS)


@pytest.mark.parametrize(
    ("nodes", "ready", "workers"),
    [
        pytest.param(None, ["a", "b"], None, id="one of all is missing"),
        pytest.param(None, ["a", "b", "c"], ["a", "b", "c"], id="all"),
        pytest.param((2, 2), ["c"], None, id="too few"),
        pytest.param((2, 2), ["c", "b"], ["b", "c"], id="enough"),
        pytest.param((1, 2), ["c"], ["c"], id="no more than are ready"),
    ],
)
def test_a_run_that_waits_begins_with(
    nodes: tuple[int, int] | None, ready: list[str], workers: list[str] | None
) -> None:
    chosen = choose_ready_nodes(spec(nodes[0] if nodes else None, nodes), ready)

    assert (None if chosen is None else [host.name for host in chosen.worker_hosts]) == workers
