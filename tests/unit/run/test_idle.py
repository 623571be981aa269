"""When the GPUs of a run are idle: the rule over the samples of its nodes."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.protocol.record_types import HealthSample
from clusterctl.run.rules.idle_detection import NodeActivity, add_health_sample, measure_gpu_idle_s

GAP = 60.0


def sample(m: float, *utils: float | None, status: str = "ok") -> HealthSample:
    gpus = [{"gpu": index, "util": util} for index, util in enumerate(utils)]
    return cast("HealthSample", {"m": m, "status": status, "gpus": gpus})


def watch(samples: list[HealthSample], gpus: tuple[int, ...] | None = None) -> dict[str, NodeActivity]:
    node = None
    for one in samples:
        node = add_health_sample(node, one, gpus, GAP)
    return {} if node is None else {"n1": node}


def steady(*utils: float | None, until: float = 300.0, **more: Any) -> list[HealthSample]:
    return [sample(15.0 * i, *utils, **more) for i in range(int(until / 15) + 1)]


@pytest.mark.parametrize(
    ("samples", "gpus", "idle_s"),
    [
        pytest.param(steady(0, 1), None, 300, id="nothing"),
        pytest.param(steady(0, 2), None, 0, id="one GPU of two works"),
        pytest.param(steady(0, 90), (0,), 300, id="the GPU that works is not one of the run"),
        pytest.param(steady(0, None), None, 0, id="a GPU that reports no utilisation"),
        pytest.param([*steady(0)[:11], sample(165, 50), *steady(0)[12:]], None, 135, id="worked once"),
        pytest.param(steady(0)[:3] + steady(0)[15:], None, 75, id="a gap between the samples"),
        pytest.param([*steady(0)[:-1], sample(300, status="stuck")], None, 0, id="a driver that hangs"),
        pytest.param(steady(status="absent"), None, 0, id="no GPU in the machine"),
        pytest.param(steady(0, 0), (), 0, id="no GPU of the run"),
        pytest.param(steady(0) + steady(0), None, 300, id="a node that reboots"),
        pytest.param([], None, 0, id="no sample"),
    ],
)
def test_a_node_is_idle_since_a_sample_last_showed_work(
    samples: list[HealthSample], gpus: tuple[int, ...] | None, idle_s: float
) -> None:
    assert measure_gpu_idle_s(watch(samples, gpus), ["n1"]) == idle_s


IDLE = NodeActivity(has_gpus=True, quiet_since=0.0, seen_at=100.0)
WORKED = NodeActivity(has_gpus=True, quiet_since=70.0, seen_at=100.0, has_worked=True)
PLAIN = NodeActivity(has_gpus=False, quiet_since=0.0, seen_at=900.0)


@pytest.mark.parametrize(
    ("nodes", "idle_s"),
    [
        pytest.param({"a": IDLE, "b": WORKED}, 30, id="the node that worked last counts"),
        pytest.param({"a": IDLE, "b": PLAIN}, 100, id="a node without GPUs does not count"),
        pytest.param({"a": PLAIN, "b": PLAIN}, 0, id="a run without GPUs is never idle"),
        pytest.param({"a": IDLE}, 0, id="a node without samples"),
    ],
)
def test_a_run_is_idle_if_all_its_nodes_are(nodes: dict[str, NodeActivity], idle_s: float) -> None:
    assert measure_gpu_idle_s(nodes, ["a", "b"]) == idle_s


@given(st.lists(st.tuples(st.floats(0.1, 100), st.sampled_from([0.0, 1.0, 2.0, 99.0, None])), min_size=1, max_size=40))
def test_the_idle_time_never_includes_work_nor_a_gap(steps: list[tuple[float, float | None]]) -> None:
    now, samples, unknown_until = 0.0, [], 0.0
    for pause, util in steps:
        now += pause
        samples.append(sample(now, util))
        if util is None or util > 1 or pause > GAP or len(samples) == 1:
            unknown_until = now
    assert measure_gpu_idle_s(watch(samples), ["n1"]) == now - unknown_until
