"""Measurements travel in facts, and bus bandwidth follows the formulas of nccl-tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clusterctl.health.deep.measurements import (
    Measure,
    Measurement,
    add_measurements,
    compute_bus_bandwidth,
    measurement_from_json,
)


def test_measurements_survive_the_facts() -> None:
    facts: dict[str, Any] = {"a": {"groups": {}}, "b": {"unreachable": "timeout"}}
    measured = [
        Measurement(node="a", measure=Measure.GEMM_TFLOPS, gpu=3, variant="bfloat16", model="H100", value=640.5),
        Measurement(node="a", measure=Measure.GEMM_DIGEST, gpu=3, digest="9f", detail="61 C"),
        Measurement(node="a", measure=Measure.PAIR_ALL_REDUCE, peers=("b",), detail="timeout"),
    ]

    add_measurements(facts, measured)

    stored = json.loads(json.dumps(facts))["a"]["groups"]["deep"]["data"]["measurements"]
    assert [measurement_from_json(entry) for entry in stored] == measured
    assert facts["b"] == {"unreachable": "timeout"}
    assert [entry.is_measured for entry in measured] == [True, True, False]


@pytest.mark.parametrize(("ranks", "expected"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_follows_nccl_tests(ranks: int, expected: float) -> None:
    assert compute_bus_bandwidth(ranks=ranks, size_bytes=10**9, duration_s=1.0) == pytest.approx(expected)
