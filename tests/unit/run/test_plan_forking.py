"""When a node is asked to fork its ranks, and that what its forkserver has in its environment is what the ranks will have."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from clusterctl.agent.supervisor import forkserver_manager
from clusterctl.config.field_types import StartMethod
from clusterctl.config.spec import Framework, HostSpec, JobSpec, RestartSpec
from clusterctl.plan import launch, layout
from tests.unit.run.test_plan_environment import ANSWERS, RUN, envs, plan_of, spec_of

FORK = JobSpec(script="t.py", start_method=StartMethod.FORK)


@pytest.mark.parametrize("framework", [Framework.AUTO, Framework.TORCH, Framework.KERAS, Framework.NONE])
@pytest.mark.parametrize("gpus", [2, (1, 3), None])
def test_nothing_that_imports_may_read_differs_between_forkserver_and_ranks(framework: Framework, gpus: object) -> None:
    hosts = (HostSpec(name="a", host="a", gpus=gpus, env={"A": "1"}), HostSpec(name="b", host="b", workers=2))
    spec = spec_of(*hosts, job={"framework": framework, "start_method": StartMethod.AUTO}, env={"B": "2"})
    ranks = envs(plan_of(spec))
    for entry in layout.assign_ranks(spec.worker_hosts, {}):
        wire = launch.build_fork_request(spec, RUN, entry, ANSWERS[entry.host.name])
        assert wire is not None
        # The node itself adds its marks.
        common = {**encoded(wire["env"]), b"CLUSTERCTL_RUN_ID": RUN.run.encode()}
        for rank in entry.ranks:
            assert (
                forkserver_manager.list_differing_variables(
                    common, {**encoded(ranks[rank]), b"CLUSTERCTL_RUN_ID": RUN.run.encode()}, spec.secrets
                )
                == []
            )


def encoded(env: dict[str, str]) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in env.items()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"script": None, "command": "./run.sh"}, "any program"),
        ({"prologue": "module load cuda"}, "run it too late"),
        ({"framework": Framework.JAX}, "jax is not known"),
        ({"framework": Framework.TENSORFLOW}, "tensorflow is not known"),
    ],
)
def test_what_stands_in_the_way_is_said_to_who_asks_for_a_fork(change: dict[str, object], reason: str) -> None:
    job = dataclasses.replace(FORK, **change)  # type: ignore[arg-type]
    spec = dataclasses.replace(spec_of(), job=job)
    assert reason in str(launch.describe_refused_fork(job))
    assert launch.describe_refused_fork(dataclasses.replace(job, start_method=StartMethod.AUTO)) is None
    (entry, *_) = layout.assign_ranks(spec.worker_hosts, {})
    assert launch.build_fork_request(spec, RUN, entry, None) is None


def test_a_module_and_a_script_can_be_forked() -> None:
    assert launch.find_fork_obstacle(FORK) is None
    assert launch.find_fork_obstacle(JobSpec(module="llm.train")) is None


def test_nobody_is_asked_where_workers_are_spawned() -> None:
    spec = spec_of()
    (entry, *_) = layout.assign_ranks(spec.worker_hosts, {})
    assert launch.build_fork_request(spec, RUN, entry, None) is None


@pytest.mark.parametrize(("attempt", "keep"), [(0, True), (1, True), (2, False)])
def test_it_is_kept_while_another_attempt_may_follow(attempt: int, keep: bool) -> None:
    spec = dataclasses.replace(spec_of(), job=FORK, restart=RestartSpec(max_restarts=2), secrets={"TOKEN": "t"})
    (entry, *_) = layout.assign_ranks(spec.worker_hosts, {})
    wire = launch.build_fork_request(spec, dataclasses.replace(RUN, attempt=attempt), entry, ANSWERS["a"])
    assert wire is not None
    assert (wire["keep"], wire["secrets"], wire["demanded"]) == (keep, ["TOKEN"], True)
    assert "t" not in wire["env"].values()


@pytest.mark.parametrize(
    ("job", "preload"),
    [
        pytest.param({}, None, id="auto"),
        pytest.param({"framework": Framework.TORCH}, ["torch"], id="torch"),
        pytest.param({"framework": Framework.KERAS}, ["keras"], id="keras"),
        pytest.param({"framework": Framework.KERAS, "preload": ("numpy",)}, ["numpy"], id="named"),
    ],
)
def test_what_is_preloaded_is_the_frameworks_own_or_what_is_named(job: dict[str, Any], preload: object) -> None:
    spec = dataclasses.replace(spec_of(), job=dataclasses.replace(FORK, **job))
    (entry, *_) = layout.assign_ranks(spec.worker_hosts, {})
    wire = launch.build_fork_request(spec, RUN, entry, None)
    assert wire is not None
    assert wire["preload"] == preload
