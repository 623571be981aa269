"""What a deep check makes of the lines of its program, whatever ranks print or fail to print."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.health.deep.measurements import Measure, Measurement
from clusterctl.health.deep.program_output import (
    LINE_MARK,
    RankOutput,
    build_measurements,
    plan_program,
    read_program_lines,
)

CPU = {"step": "context", "device": "cpu", "kind": "EPYC", "uuid": None}
GPU = {"step": "context", "device": "cuda", "kind": "H100", "uuid": "GPU-1"}
GEMM = {"step": "gemm", "kind": "float32", "rate": 2e12, "cpu_s": 0.2, "began": 10.0, "t": 11.0}


def measure(
    *lines: dict[str, Any], samples: Any = (), rounds: Any = (), nodes: Any = ("n1", "n2")
) -> list[Measurement]:
    rank = RankOutput(node="n1", local_rank=0, lines=lines)
    return build_measurements([rank], nodes, rounds, {"n1": samples}, "the run ended")


def only(found: list[Measurement], measure: Measure) -> Measurement:
    (one,) = (measurement for measurement in found if measurement.measure is measure)
    return one


@pytest.mark.parametrize(
    ("lines", "value", "detail"),
    [
        pytest.param([], None, "no result: the run ended", id="nothing printed"),
        pytest.param([CPU], 0.0, "", id="a context"),
        pytest.param(
            [{"step": "failed", "during": "start", "is_late": False, "reason": "exit code 1: No module named 'torch'"}],
            None,
            "the process that measures ended during `start`: exit code 1: No module named 'torch'",
            id="no torch",
        ),
        pytest.param(
            [CPU, {"step": "failed", "during": "gemm", "is_late": False, "reason": "killed by SIGSEGV"}],
            1.0,
            "the process that measures ended during `gemm`: killed by SIGSEGV",
            id="a crash is a fault of the node",
        ),
        pytest.param(
            [CPU, {"step": "failed", "during": "gemm", "is_late": True, "reason": "no answer within 30 s"}],
            None,
            "the process that measures ended during `gemm`: no answer within 30 s",
            id="a slow CPU may be busy",
        ),
        pytest.param(
            [GPU, {"step": "failed", "during": "gemm", "is_late": True, "reason": "no answer within 30 s"}],
            1.0,
            "the process that measures ended during `gemm`: no answer within 30 s",
            id="a GPU that does not answer is bad",
        ),
        pytest.param(
            [
                GPU,
                {"step": "failed", "during": "round", "round": 2, "is_late": True, "reason": "no answer within 90 s"},
            ],
            None,
            "the process that measures ended during `round 3`: no answer within 90 s",
            id="a late rank of a round may wait for a peer",
        ),
        pytest.param(
            [CPU, {"step": "failed", "during": "round", "round": 0, "is_late": False, "reason": "exit code 1: reset"}],
            None,
            "the process that measures ended during `round 1`: exit code 1: reset",
            id="a rank that fails in a round may have lost its store",
        ),
        pytest.param([{"step": "context"}], None, "its output is invalid: KeyError: 'device'", id="invalid"),
    ],
)
def test_what_is_known_of_a_device(lines: list[dict[str, Any]], value: float | None, detail: str) -> None:
    found = only(measure(*lines), Measure.CONTEXT_ERRORS)
    assert (found.value, found.detail) == (value, detail)


@pytest.mark.parametrize(
    ("context", "cpu_s", "value"),
    [
        pytest.param(CPU, 0.2, 2.0, id="CPU"),
        pytest.param(CPU, 0.01, None, id="others used the CPU"),
        pytest.param(GPU, 0.01, 2.0, id="a GPU needs no CPU"),
    ],
)
def test_a_rate_of_a_busy_cpu_is_no_rate(context: dict[str, Any], cpu_s: float, value: float | None) -> None:
    found = only(measure(context, {**GEMM, "cpu_s": cpu_s}), Measure.GEMM_TFLOPS)
    assert (found.value, found.variant, found.model) == (value, "float32", context["kind"])


def sample(t: float, **gpu: Any) -> dict[str, Any]:
    return {"t": t, "gpus": [{"gpu": 3, "uuid": "GPU-1", "sm_clock": 1980, "pcie_gen": 5, "pcie_width": 16, **gpu}]}


def test_readings_of_the_driver_count_under_load_alone() -> None:
    idle = sample(9.0, pcie_gen=1, sm_clock=345, throttle=0)
    loaded = [sample(10.2, throttle=0), sample(10.5, throttle=0x48), sample(10.9, throttle=0x48, power_w=690.0)]
    found = measure(GPU, GEMM, samples=[idle, *loaded])
    clock, link, throttle = (only(found, m) for m in (Measure.CLOCK, Measure.PCIE_LINK, Measure.THROTTLE))
    assert (clock.gpu, clock.value, clock.detail) == (3, 1980, "690 W")
    assert link.digest == "5x16"
    assert throttle.digest == "hardware thermal slowdown"


def test_without_a_reading_under_load_nothing_is_known() -> None:
    found = measure(GPU, GEMM, samples=[sample(9.0)])
    assert not any(only(found, m).is_measured for m in (Measure.CLOCK, Measure.PCIE_LINK, Measure.THROTTLE))


ROUND = {"step": "round", "round": 0, "group": [0, 1], "ranks": 2, "seconds": 0.01, "bytes": 1 << 20, "repeats": 3}


def test_one_rank_that_could_not_finish_does_not_hide_the_time_of_a_pair() -> None:
    failed = {"step": "round", "round": 0, "group": [0, 1], "ranks": 2, "seconds": None, "reason": "timed out"}
    for lines in ([{**ROUND, "backend": "gloo"}, failed], [failed, {**ROUND, "backend": "gloo"}]):
        pair = only(measure(CPU, *lines), Measure.PAIR_ALL_REDUCE)
        assert (pair.members, pair.value, pair.variant) == ({"n1", "n2"}, pytest.approx(0.1048576), "gloo")


def test_a_pair_that_nobody_reports_is_unknown() -> None:
    found = measure(CPU, rounds=[[[0, 1]], [[0, 2]]], nodes=("n1", "n2"))
    pair = only(found, Measure.PAIR_ALL_REDUCE)
    assert (pair.members, pair.value) == ({"n1", "n2"}, None)


@given(st.binary(), st.lists(st.dictionaries(st.sampled_from(list(GEMM)), st.integers() | st.text()), max_size=3))
def test_no_output_of_a_node_breaks_the_check(noise: bytes, lines: list[dict[str, Any]]) -> None:
    text = b"".join(LINE_MARK.encode() + json.dumps(line).encode() + b"\n" for line in lines)
    output = RankOutput(node="n1", local_rank=0, lines=read_program_lines(noise + b"\n" + text + LINE_MARK.encode()))
    found = build_measurements([output], ["n1"], [], {}, "the run ended")
    assert any(measurement.measure is Measure.CONTEXT_ERRORS for measurement in found)


@pytest.mark.parametrize(
    ("nodes", "full", "pairs"),
    [
        pytest.param(1, False, 0, id="alone"),
        pytest.param(8, False, 28, id="8"),
        pytest.param(16, False, 120, id="16"),
        pytest.param(40, False, 40, id="two partners each"),
        pytest.param(40, True, 2 * 780, id="full"),
    ],
)
def test_which_pairs_are_measured(nodes: int, full: bool, pairs: int) -> None:
    rounds = plan_program(nodes, full=full)["rounds"]
    assert sum(len(group) == 2 for groups in rounds[1 : len(rounds) - (nodes > 2)] for group in groups) == pairs
