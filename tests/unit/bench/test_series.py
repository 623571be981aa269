"""Which runs a scaling report takes, and what their numbers say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.bench import results, series
from clusterctl.bench.results import Measured
from clusterctl.config.path_rules import default_workdir
from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec, TransportKind
from clusterctl.errors import RefusedError

NO_PARTS: dict[str, float | None] = dict.fromkeys(results.PARTS)


def cluster(*gpus: int, job: JobSpec | None = None, **more: object) -> ClusterSpec:
    hosts = tuple(HostSpec(name=f"n{i}", host=f"n{i}", gpus=count, **more) for i, count in enumerate(gpus))  # type: ignore[arg-type]
    return ClusterSpec(name="demo", path="/demo/cluster.yaml", hosts=hosts, job=job)


def steps(spec: ClusterSpec, *asked: int, built_in: bool = True) -> list[series.Step]:
    gpus = {h.name: h.gpus for h in spec.hosts if isinstance(h.gpus, int)}
    return series.series(spec, series.capacities(spec.workers, {}), asked, built_in=built_in, gpus=gpus)


@pytest.mark.parametrize(
    ("total", "asked", "wanted"),
    [
        pytest.param(1, (), (1,), id="one"),
        pytest.param(8, (), (1, 2, 4, 8), id="powers of two"),
        pytest.param(12, (), (1, 2, 4, 8, 12), id="and all"),
        pytest.param(12, (12, 3, 3), (3, 12), id="what was asked for, in order, once"),
    ],
)
def test_numbers_of_workers(total: int, asked: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert series.counts(total, asked) == wanted


def test_more_workers_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(RefusedError, match="13 workers"):
        series.counts(12, (13,))


@given(rooms=st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 8), min_size=1), data=st.data())
def test_workers_are_spread_evenly_and_within_the_room(rooms: dict[str, int], data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, sum(rooms.values())))
    given_to = series.spread(workers, rooms)
    assert sum(given_to.values()) == workers
    assert all(0 < count <= rooms[host] for host, count in given_to.items())
    # Nobody has two more than a host that could take another one.
    assert all(count >= max(given_to.values()) - 1 for host, count in given_to.items() if count < rooms[host])


def test_two_workers_on_two_hosts_take_one_gpu_of_each() -> None:
    two = next(step for step in steps(cluster(8, 8)) if step.workers == 2)
    assert [(h.name, h.workers, h.gpus) for h in two.spec.hosts] == [("n0", 1, 1), ("n1", 1, 1)]


def test_data_parallel_is_one_process_with_all_gpus_of_a_machine() -> None:
    (alone,) = [step for step in steps(cluster(8, 8)) if step.modes == ("dp",)]
    assert [(h.workers, h.gpus) for h in alone.spec.hosts] == [(1, 8)]


def test_without_gpus_one_run_measures_all_that_one_process_can_be() -> None:
    assert [(s.workers, s.modes) for s in steps(cluster(0, 0))] == [(1, ("single", "dp", "ddp")), (2, ("ddp",))]


def test_local_hosts_share_the_cores_of_one_machine() -> None:
    spec = cluster(0, 0, transport=TransportKind.LOCAL)
    assert all("--max-workers 2" in " ".join(s.spec.job.args) for s in steps(spec) if s.spec.job)


@pytest.mark.parametrize(
    ("workdir", "expected"),
    [
        pytest.param(default_workdir("demo", "/demo"), default_workdir("demo-bench", "/demo"), id="the default"),
        pytest.param("~/mine", "~/mine", id="one that a person chose"),
    ],
)
def test_a_benchmark_writes_nothing_among_the_results_of_real_runs(workdir: str, expected: str) -> None:
    assert {host.workdir for step in steps(cluster(1, workdir=workdir)) for host in step.spec.hosts} == {expected}


def test_the_users_job_stays_as_it_is() -> None:
    job = JobSpec(script="train.py", args=("--fast",))
    assert [(s.modes, s.spec.job) for s in steps(cluster(1, 1, job=job), built_in=False)] == [(("job",), job)] * 2


def test_speed_up_and_efficiency_are_those_of_one_device() -> None:
    found = [Measured(mode="single", workers=1, epoch_s=4.0, parts=NO_PARTS), Measured(mode="ddp", workers=4, epoch_s=1.25, parts=NO_PARTS)]  # fmt: skip
    assert [(r.speedup, r.efficiency) for r in results.compared(found)] == [(1.0, 1.0), (3.2, 0.8)]


def test_without_a_single_device_the_fewest_workers_count_as_perfect() -> None:
    found = [replace(one, mode="job") for one in (Measured(mode="", workers=2, epoch_s=4.0, parts=NO_PARTS), Measured(mode="", workers=4, epoch_s=4.0, parts=NO_PARTS))]  # fmt: skip
    assert [(r.speedup, r.efficiency) for r in results.compared(found)] == [(2.0, 1.0), (2.0, 0.5)]


def test_the_models_numbers_are_found_among_other_output() -> None:
    output = 'hello\nclusterctl-bench {"mode": "dp", "workers": 1, "epoch_s": 2.0, "data": 0.5, "compute": 1.5, "comm": null, "wait": null}\n'
    (one,) = results.read_model(output)
    assert (one.mode, one.epoch_s, one.parts["comm"]) == ("dp", 2.0, None)
    (row,) = results.compared([one])
    assert results.shares(row) == {"data": 0.25, "compute": 0.75, "comm": None, "wait": None}
    assert set(results.to_json([row])[0]) == {"mode", "workers", "epoch_s", "speedup", "efficiency", *results.PARTS}


def sample(time: float, step: int | None, age: float | None) -> dict[str, object]:
    return {"m": time, "ranks": {"0": {"inside": {"step": step, "progress_age_s": age}}}}


def test_a_jobs_epoch_begins_with_its_first_step_and_not_with_its_imports() -> None:
    seen = results.steps_of_job([sample(99.0, None, None), sample(112.0, 19, 1.0), sample(122.5, 39, 1.5)], 0)
    assert seen == [(111.0, 19), (121.0, 39)]
    assert results.epoch_of_job(seen, 50.0, 126.0, 5) == pytest.approx((126.0 - 101.0) / 5)


@pytest.mark.parametrize("seen", [[], [(3.0, 5)]], ids=["nothing seen", "one step seen"])
def test_a_job_whose_pace_is_not_seen_counts_in_full(seen: list[tuple[float, int]]) -> None:
    assert results.epoch_of_job(seen, 1.0, 7.0, 2) == 3.0


def timed(mode: str, workers: int, epoch_s: float) -> Measured:
    return Measured(mode=mode, workers=workers, epoch_s=epoch_s, parts=NO_PARTS)


@pytest.mark.parametrize(
    ("measured", "doubt"),
    [
        pytest.param([timed("single", 1, 2.0), timed("ddp", 2, 1.0)], None, id="perfect"),
        pytest.param([timed("single", 1, 2.0), timed("ddp", 2, 0.9)], None, id="a little better than perfect"),
        pytest.param([timed("single", 1, 2.0), timed("ddp", 1, 0.8)], "2.50 by ddp on 1", id="one worker"),
    ],
)
def test_a_speed_up_that_cannot_be_is_called_noise(measured: list[Measured], doubt: str | None) -> None:
    found = results.doubt(results.compared(measured))

    assert found is None if doubt is None else found is not None and doubt in found
