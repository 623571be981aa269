"""What a job needs of the Python that it names, judged from the names of packages."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.health.findings import Status
from clusterctl.health.judge import judge_node
from clusterctl.health.settings import HealthSettings, NodeDeclaration

BARE: dict[str, Any] = {"executable": "/usr/bin/python3", "names": {}, "torch": None, "torch_cuda": None}
CPU = {**BARE, "torch": "2.13.0+cpu", "names": {"torch": "2.13.0+cpu", "keras": "3.15.1"}}


def judged(check: str, framework: str, versions: dict[str, Any], gpus: int | None = 0) -> tuple[Status, str]:
    context = HealthSettings(nodes={"n1": NodeDeclaration(gpus=gpus)}, framework=framework)
    facts = {"groups": {"versions": {"status": "ok", "data": versions}}}
    (finding,) = judge_node("n1", facts, context, [check])
    assert finding.node == "n1"
    return finding.status, finding.message


@pytest.mark.parametrize(
    ("framework", "versions", "status", "message"),
    [
        pytest.param("torch", BARE, Status.FAIL, "no torch in /usr/bin/python3", id="no-torch"),
        pytest.param("keras", BARE, Status.FAIL, "no keras and torch in /usr/bin/python3", id="no-keras-no-torch"),
        pytest.param("tensorflow", BARE, Status.FAIL, "no tensorflow in /usr/bin/python3", id="no-tensorflow"),
        pytest.param("jax", CPU, Status.FAIL, "no jax in /usr/bin/python3", id="no-jax"),
        pytest.param("keras", CPU, Status.PASS, "keras 3.15.1, torch 2.13.0+cpu", id="keras"),
        pytest.param(
            "tensorflow",
            {**BARE, "names": {"tensorflow-cpu": "2.21.0"}},
            Status.PASS,
            "tensorflow-cpu 2.21.0",
            id="tensorflow-by-another-name",
        ),
        pytest.param("auto", BARE, Status.SKIP, "`job.framework` names no framework", id="nothing-named"),
    ],
)
def test_a_missing_framework_is_named_with_the_python_that_lacks_it(
    framework: str, versions: dict[str, Any], status: Status, message: str
) -> None:
    assert judged("version.framework", framework, versions) == (status, message)


@pytest.mark.parametrize(
    ("framework", "versions", "gpus", "status"),
    [
        pytest.param("torch", CPU, 8, Status.FAIL, id="cpu-build-with-gpus"),
        pytest.param("keras", CPU, 8, Status.FAIL, id="keras-on-a-cpu-build-with-gpus"),
        pytest.param("auto", CPU, 8, Status.WARN, id="cpu-build-that-the-job-may-not-use"),
        pytest.param("jax", CPU, 8, Status.SKIP, id="cpu-build-that-the-job-does-not-use"),
        pytest.param("torch", CPU, 0, Status.SKIP, id="cpu-build-on-cpus"),
        pytest.param("torch", CPU, None, Status.SKIP, id="gpus-not-declared"),
        pytest.param("torch", {**CPU, "torch_cuda": "13.0", "torch": "2.13.0"}, 8, Status.PASS, id="cuda-build"),
        pytest.param("torch", {**CPU, "torch": "2.13.0+rocm7.0"}, 8, Status.PASS, id="rocm-build"),
    ],
)
def test_torch_for_cpus_is_refused_where_gpus_are_declared(
    framework: str, versions: dict[str, Any], gpus: int | None, status: Status
) -> None:
    assert judged("version.gpu_build", framework, versions, gpus)[0] is status
