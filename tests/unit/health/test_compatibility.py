"""A framework whose CUDA cannot run is found before the first worker: by the driver, and by the code that it carries."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_node
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health.healthy import changed, facts

FAIL, WARN, PASS, SKIP = Status.FAIL, Status.WARN, Status.PASS, Status.SKIP
DRIVERS = {450: 11000, 525: 12000, 550: 12040, 570: 12080, 580: 13000}
"""Driver branch and the newest CUDA that it runs."""
OLDEST = {"11.8": 450, "12.6": 525, "12.8": 525, "13.0": 580}
"""Build and the oldest driver branch for it (NVIDIA, CUDA compatibility, minor version compatibility)."""
CODE = {
    "11.8": (70, 75, 80, 90),
    "12.6": (70, 75, 80, 90),
    "12.8": (70, 75, 80, 90, 100, 120),
    "13.0": (75, 80, 90, 100, 120),
}
"""Build and the compute capabilities that its toolkit makes code for (release notes of the CUDA toolkit)."""


def judged(framework: str | None = "torch", **changes: Any) -> list[Finding]:
    context = HealthSettings(nodes={"n": NodeDeclaration(gpus=8)}, framework=framework)
    return judge_node("n", changed(facts(), **changes), context, ["version.cuda_driver"])


def built(cuda: str, driver: int, capability: int = 90, **more: Any) -> dict[str, Any]:
    capabilities = {f"gpu{i}__capability": [capability // 10, capability % 10] for i in range(8)}
    version = {"nvml__driver": f"{driver}.10", "nvml__cuda": DRIVERS[driver], "versions__torch_cuda": cuda}
    return {**capabilities, **version, **more}


@pytest.mark.parametrize("cuda", OLDEST)
def test_a_build_runs_where_driver_and_code_allow_it(cuda: str) -> None:
    for driver in DRIVERS:
        for capability in (70, 75, 80, 90, 100, 120):
            runs = driver >= OLDEST[cuda] and capability in CODE[cuda]
            found = judged(**built(cuda, driver, capability))
            assert {f.status for f in found} == {PASS if runs else FAIL}, (driver, capability)


def test_what_is_missing_is_named_with_both_ways_out() -> None:
    (found,) = judged(**built("13.0", 550), versions__torch="2.9.0")
    assert found.message == "torch 2.9.0 is built for CUDA 13.0, driver 550.10 runs CUDA up to 12.4"
    assert "driver 580 or later" in str(found.hint)
    assert "whl/cu128" in str(found.hint)


def test_a_compatibility_package_in_the_jobs_environment_counts() -> None:
    assert [f.status for f in judged(**built("13.0", 550, nvml__cuda=13000))] == [PASS]


def test_a_driver_that_does_not_tell_its_cuda_is_judged_by_its_version() -> None:
    assert [f.status for f in judged(**built("13.0", 550, nvml__cuda=None))] == [FAIL]
    assert [f.status for f in judged(**built("12.6", 550, nvml__cuda=None))] == [PASS]


def test_a_container_without_the_drivers_compute_library_is_told() -> None:
    (found,) = judged(nvml__cuda=None, nvml__cuda_error=12)
    assert (found.status, "libcuda.so.1" in found.message) == (WARN, True)


def test_a_build_of_ones_own_may_carry_code_that_the_driver_translates() -> None:
    found = judged(**built("12.6", 580, 100), versions__torch="2.6.0a0+ecf3bae40a.nv25.01")
    assert {f.status for f in found} == {WARN}


def test_only_the_gpus_that_lack_code_are_named() -> None:
    assert {f.gpu for f in judged(**{**built("12.6", 580), "gpu5__capability": [12, 0]})} == {5}


@pytest.mark.parametrize(
    ("framework", "names", "status"),
    [
        ("torch", {"jax": "0.5"}, FAIL),
        ("auto", {"torch": "2.9.0"}, FAIL),
        ("auto", {"torch": "2.9.0", "jax": "0.5"}, WARN),
        ("tensorflow", {"tensorflow": "2.19"}, SKIP),
        ("none", {}, SKIP),
        ("jax", {"jax": "0.7", "jax-cuda13-plugin": "0.7.0"}, FAIL),
        ("jax", {"jax": "0.7", "jax-cuda12-plugin": "0.7.0"}, PASS),
        ("jax", {"jax": "0.7"}, SKIP),
    ],
)
def test_the_framework_that_the_job_uses_is_the_one_that_counts(
    framework: str, names: dict[str, str], status: Status
) -> None:
    found = judged(framework, **built("13.0", 550), versions__names=names)
    assert {f.status for f in found} == {status}


@pytest.mark.parametrize(
    "changes", [{"versions__torch": None, "versions__torch_cuda": None}, {"versions__torch_cuda": None}]
)
def test_where_no_cuda_is_asked_for_there_is_nothing_to_compare(changes: dict[str, Any]) -> None:
    assert [f.status for f in judged(**changes)] == [SKIP]
