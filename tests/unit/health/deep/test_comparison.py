"""What is measured under load is judged by comparison; what was not measured is never healthy."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from clusterctl.health.deep.measurements import Measure, Measurement, add_measurements
from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_cluster
from clusterctl.health.registry import CHECKS
from clusterctl.health.settings import HealthSettings

NODES = ("n0", "n1", "n2", "n3", "n4")
SICK = "n1"
FAIL, WARN, UNKNOWN, PASS, SKIP = Status.FAIL, Status.WARN, Status.UNKNOWN, Status.PASS, Status.SKIP
DIGESTS = {Measure.GEMM_DIGEST: "9f3a", Measure.PCIE_LINK: "5x16", Measure.THROTTLE: "none"}
RATES = {
    Measure.GEMM_TFLOPS: 640.0,
    Measure.MEMORY_BANDWIDTH: 2600.0,
    Measure.HOST_TO_DEVICE: 50.0,
    Measure.DEVICE_TO_HOST: 50.0,
    Measure.CLOCK: 1980.0,
    Measure.NODE_ALL_REDUCE: 440.0,
}
NETWORK = (Measure.PAIR_ALL_REDUCE, Measure.GROUP_ALL_REDUCE)


def measure_all(nodes: Iterable[str] = NODES, gpus: int = 2) -> list[Measurement]:
    """Healthy measurements, whose rates spread by 3 %."""
    rnd = random.Random(7)
    names = tuple(nodes)
    healthy = [
        Measurement(
            node=node,
            gpu=gpu,
            measure=measure,
            model="H100",
            value=None if measure.is_category else round(RATES.get(measure, 0.0) * rnd.uniform(0.985, 1.015), 1),
            digest=DIGESTS.get(measure),
        )
        for node in names
        for gpu in range(gpus)
        for measure in Measure
        if measure not in NETWORK
    ]
    pairs = [
        Measurement(node=a, peers=(b,), measure=Measure.PAIR_ALL_REDUCE, value=rnd.uniform(46, 47))
        for a, b in combinations(names, 2)
    ]
    return [*healthy, *pairs, Measurement(node=names[0], peers=names[1:], measure=Measure.GROUP_ALL_REDUCE, value=45.0)]


def judge(measurements: Iterable[Measurement], check: str, nodes: Iterable[str] = NODES) -> list[Finding]:
    facts: dict[str, dict[str, Any]] = {node: {"groups": {}} for node in nodes}
    add_measurements(facts, measurements)
    return judge_cluster(facts, HealthSettings(), [check])


def alter(measure: Measure, gpu: int | None = 1, node: str = SICK, **fields: Any) -> list[Measurement]:
    """Healthy measurements but for one of a node; for `gpu=None`, for all of them that concern the node."""
    return [
        replace(entry, **fields)
        if entry.measure is measure and node in entry.members and gpu in (None, entry.gpu)
        else entry
        for entry in measure_all()
    ]


Case = tuple[list[Measurement], Status, str]
CASES: dict[str, list[Case]] = {
    "deep.context": [(alter(Measure.CONTEXT_ERRORS, value=1, detail="CUDA error 802"), FAIL, "CUDA error 802")],
    "deep.memory": [(alter(Measure.MEMORY_ERRORS, value=3), FAIL, "other values than were written")],
    "deep.bits": [
        (alter(Measure.GEMM_ERRORS, value=1), FAIL, "different bits"),
        (alter(Measure.GEMM_DIGEST, digest="0bad"), FAIL, "0bad, 9f3a on 9 alike"),
    ],
    "deep.gemm": [
        (alter(Measure.GEMM_TFLOPS, value=550.0), WARN, "GEMM 550 TFLOP/s, median of 10 alike 637"),
        (alter(Measure.GEMM_TFLOPS, value=320.0), FAIL, "GEMM 320 TFLOP/s"),
    ],
    "deep.memory_bandwidth": [(alter(Measure.MEMORY_BANDWIDTH, value=1300.0), FAIL, "1300 GB/s")],
    "deep.host_bandwidth": [(alter(Measure.DEVICE_TO_HOST, value=25.0), FAIL, "GPU to host 25 GB/s")],
    "deep.node_all_reduce": [(alter(Measure.NODE_ALL_REDUCE, value=200.0), FAIL, "all-reduce 200 GB/s")],
    "deep.load": [
        (alter(Measure.CLOCK, value=900.0), FAIL, "clock 900 MHz"),
        (alter(Measure.PCIE_LINK, digest="1x16"), WARN, "PCIe link 1x16, 5x16 on 9 alike"),
        (alter(Measure.THROTTLE, digest="hw_thermal"), WARN, "throttled: hw_thermal"),
    ],
    "deep.pairs": [(alter(Measure.PAIR_ALL_REDUCE, None, value=20.0), FAIL, "certain: slow with all other nodes")],
    "deep.fabric": [
        (alter(Measure.GROUP_ALL_REDUCE, None, value=10.0), WARN, "10 GB/s over n[0-4] together, 46.7 in pairs")
    ],
}
ROWS = [pytest.param(name, *case, id=f"{name}-{case[2]}") for name, cases in CASES.items() for case in cases]


def test_every_deep_check_has_its_cases() -> None:
    assert set(CASES) == {name for name in CHECKS if name.startswith("deep.")}


@pytest.mark.parametrize("name", CASES)
def test_healthy_nodes_pass(name: str) -> None:
    assert [finding.status for finding in judge(measure_all(), name)] == [PASS]


@pytest.mark.parametrize(("name", "measurements", "status", "words"), ROWS)
def test_one_fault_is_found_and_named(name: str, measurements: list[Measurement], status: Status, words: str) -> None:
    (found,) = judge(measurements, name)

    assert (found.status, found.hint is not None) == (status, True)
    assert words in found.message
    if name != "deep.fabric":
        assert (found.node, found.gpu) == (SICK, None if name == "deep.pairs" else 1)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_judged_without_a_measurement(name: str) -> None:
    (found,) = judge_cluster({node: {"groups": {"host": {}}} for node in NODES}, HealthSettings(), [name])

    assert (found.status, found.message) == (SKIP, "not measured; `clusterctl health --deep` measures")


@pytest.mark.parametrize("name", CASES)
def test_what_could_not_be_measured_is_unknown(name: str) -> None:
    failed = [replace(entry, value=None, digest=None, detail="timeout") for entry in measure_all()]

    found = judge(failed, name)

    assert {finding.status for finding in found} == {UNKNOWN}
    assert all(finding.message.endswith("not measured: timeout") for finding in found)


@pytest.mark.parametrize("name", [name for name in CASES if name != "deep.fabric"])
def test_a_node_that_was_left_out_is_unknown_and_the_others_are_judged(name: str) -> None:
    others = [entry for entry in measure_all() if SICK not in entry.members]
    left_out = Measurement(node=SICK, measure=Measure.CONTEXT_ERRORS, detail="left out: in use")

    (found,) = judge([*others, left_out], name)

    assert (found.status, found.node, found.message) == (UNKNOWN, SICK, "not measured: left out: in use")


@pytest.mark.parametrize(
    ("nodes", "slow"), [(("n0", "n1"), {"n1"}), (("n0", "n1", "n2", "n3"), {"n1", "n2"})], ids=["two", "tie"]
)
@pytest.mark.parametrize(
    ("name", "measure", "fields"),
    [
        ("deep.gemm", Measure.GEMM_TFLOPS, {"value": 300.0}),
        ("deep.bits", Measure.GEMM_DIGEST, {"digest": "0bad"}),
        ("deep.pairs", Measure.PAIR_ALL_REDUCE, {"value": 20.0}),
    ],
    ids=["rates", "digests", "pairs"],
)
def test_without_a_majority_nobody_is_blamed(
    nodes: tuple[str, ...], slow: set[str], name: str, measure: Measure, fields: dict[str, Any]
) -> None:
    measurements = [
        replace(entry, **fields) if entry.measure is measure and entry.members & slow else entry
        for entry in measure_all(nodes, gpus=1)
    ]

    (found,) = judge(measurements, name, nodes)

    expected = SKIP if name == "deep.pairs" and len(nodes) == 2 else WARN
    assert (found.status, found.node, "disagree" in found.message) == (expected, None, expected is WARN)


def test_one_device_is_compared_with_nobody() -> None:
    (found,) = judge(measure_all(["n0"], gpus=1), "deep.gemm", ["n0"])

    assert found.status is SKIP


def test_other_models_are_other_groups() -> None:
    old = [replace(entry, model="A100", value=(entry.value or 0) / 3) for entry in measure_all(["n5", "n6"])]

    (found,) = judge([*measure_all(), *old], "deep.gemm", [*NODES, "n5", "n6"])

    assert found.status is PASS


def test_the_best_of_several_repeats_counts() -> None:
    slow = alter(Measure.GEMM_TFLOPS, value=100.0)

    (found,) = judge([*slow, *measure_all()], "deep.gemm")

    assert found.status is PASS


def test_a_low_rate_among_few_devices_is_no_failure() -> None:
    few = [entry for entry in alter(Measure.GEMM_TFLOPS, 0, value=100.0) if entry.gpu == 0 and entry.node != "n4"]

    (found,) = judge(few, "deep.gemm", NODES[:4])

    assert (found.status, found.node) == (WARN, SICK)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        pytest.param(5.0, [(PASS, None)], id="a seventh less"),
        pytest.param(4.5, [(WARN, "n0")], id="a quarter less"),
        pytest.param(2.9, [(FAIL, "n0")], id="half"),
    ],
)
def test_a_cpu_is_blamed_only_if_it_is_far_slower_because_other_programs_use_it_too(
    rate: float, expected: list[tuple[Status, str | None]]
) -> None:
    speeds = dict(zip(NODES, (rate, 5.8, 5.9, 6.0, 5.9), strict=True))
    found = judge(
        [Measurement(node=n, measure=Measure.MEMORY_BANDWIDTH, model="cpu", value=v) for n, v in speeds.items()],
        "deep.memory_bandwidth",
        tuple(speeds),
    )

    assert [(f.status, f.node) for f in found] == expected


def test_rates_of_public_machines_only_warn() -> None:
    slow = [replace(entry, model="AMD Instinct MI300X OAM", variant="bfloat16", value=300.0) for entry in measure_all()]

    (found,) = judge(slow, "deep.gemm")

    assert (found.status, found.node) == (WARN, None)
    assert "but 600 on public machines" in found.message


def test_a_slow_link_is_named_and_no_node_is_blamed() -> None:
    def slow(entry: Measurement) -> Measurement:
        return replace(entry, value=20.0) if entry.members == {"n1", "n3"} else entry

    once = judge(map(slow, measure_all()), "deep.pairs")
    twice = judge([*map(slow, measure_all()), *map(slow, measure_all())], "deep.pairs")

    assert [(f.status, f.node, f.message[:42]) for f in [*once, *twice]] == [
        (WARN, None, "likely: the link between n1 and n3 is slow"),
        (FAIL, None, "certain: the link between n1 and n3 is slo"),
    ]


def test_pairs_that_scatter_are_unknown() -> None:
    rnd = random.Random(3)
    scattered = [
        replace(entry, value=rnd.uniform(20, 46)) if entry.measure is Measure.PAIR_ALL_REDUCE else entry
        for entry in measure_all()
    ]

    (found,) = judge(scattered, "deep.pairs")

    assert (found.status, "scatter" in found.message) == (UNKNOWN, True)


def test_the_cluster_file_decides_about_deep_checks() -> None:
    facts: dict[str, dict[str, Any]] = {node: {"groups": {}} for node in NODES}
    add_measurements(facts, alter(Measure.GEMM_TFLOPS, value=320.0))
    settings = HealthSettings(ignore=("deep.gemm@n1",))

    found = judge_cluster(facts, settings, ["deep.gemm"])

    assert [(finding.status, finding.ignored) for finding in found] == [(SKIP, True)]
