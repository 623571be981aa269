"""Samples of nodes become events, each trouble told once, whoever was the controller when it began."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.protocol import events as node_events
from clusterctl.config.spec import ClusterSpec, HealthSpec, HostSpec, RestartSpec
from clusterctl.run.rules import controller_events, next_action
from clusterctl.run.rules.health_observer import HealthObserver
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, WorkerPhase, WorkerState
from clusterctl.run.rules.state_updates import apply_controller_event, apply_node_event

if TYPE_CHECKING:
    from collections.abc import Iterable

LOST: dict[str, Any] = {"err": {"temp": "lost"}, "codes": {"temp": 15}}
HOT: dict[str, Any] = {"throttle": 0x48, "temp_c": 84}
QUICK = {"during.slowdown": 30.0, "during.clear_after": 10.0}


def spec(**health: Any) -> ClusterSpec:
    hosts = (
        HostSpec(name="a", host="a", gpus=(0, 5)),
        HostSpec(name="b", host="b"),
        HostSpec(name="cpu", host="cpu", gpus=0),
    )
    return ClusterSpec(name="n", path="/n", hosts=hosts, job=None, health=HealthSpec(**{"thresholds": QUICK, **health}))


def line(moment: float, gpu: int = 5, xids: Iterable[tuple[int | None, int]] = (), **values: Any) -> list[bytes]:
    calm = {"gpu": gpu, "temp_c": 60, "throttle": 0, "ecc_unc": 0, "err": {}, "codes": {}}
    reported = [{"gpu": index, "xid": code} for index, code in xids]
    # The wall clock jumps about: only the other one may count.
    sample = {"t": -7 * moment, "m": moment, "status": "ok", "gpus": [{**calm, **values}], "xids": reported}
    return [json.dumps({**sample, "attempt": 0, "kind": "health"}, separators=(",", ":")).encode()]


def row(first: int, last: int, **values: Any) -> list[bytes]:
    return [sample for m in range(first, last, 15) for sample in line(float(m), **values)]


def said(changes: list[controller_events.HealthChanged]) -> list[tuple[str, str]]:
    return [(event.status, event.message) for event in changes]


def state_with(told: list[controller_events.HealthChanged]) -> RunState:
    state = RunState(nodes={"a": NodeState(node="a", node_rank=0), "b": NodeState(node="b", node_rank=1)})
    for event in told:
        state = apply_controller_event(state, 0.0, event)
    return state


def test_a_replica_that_is_sent_again_tells_nothing_again() -> None:
    observer = HealthObserver(spec())
    observer.add_sample_lines("a", row(0, 120, **HOT), 0.0)
    assert observer.add_sample_lines("a", row(0, 120, **HOT), 1.0) == []


def test_gpus_of_others_on_the_same_machine_are_none_of_our_business() -> None:
    observer = HealthObserver(spec())
    assert observer.add_sample_lines("a", line(0.0, gpu=3, xids=[(3, 79)], **LOST), 0.0) == []
    assert [e.gpu for e in observer.add_sample_lines("b", line(0.0, gpu=3, **LOST), 0.0)] == [3]


def test_a_run_without_gpus_does_not_care_what_a_driver_does() -> None:
    observer = HealthObserver(spec())
    stuck = {"m": 0.0, "status": "stuck", "stuck_s": 999.0, "gpus": [], "xids": [], "kind": "health"}
    line_of_it = [json.dumps(stuck, separators=(",", ":")).encode()]
    data = line_of_it + line(15.0, xids=[(None, 79)], **LOST)
    assert observer.add_sample_lines("cpu", data, 0.0) == []
    assert [event.check for event in observer.add_sample_lines("b", line_of_it, 0.0)] == ["gpu.responsive"]


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        pytest.param(79, "FAIL", "XID 79, GPU has fallen off the bus", id="hardware"),
        pytest.param(
            31, "WARN", "XID 31, GPU memory page fault (application error, not hardware)", id="the job's own fault"
        ),
        pytest.param(145, "WARN", "XID 145, NVLink error", id="nobody knows whether it is fatal"),
    ],
)
def test_an_xid_is_told_once_and_is_never_over(code: int, status: str, words: str) -> None:
    observer = HealthObserver(spec())
    data = line(0.0, xids=[(5, code)]) + line(15.0, xids=[(5, code)]) + row(30, 6000)
    assert said(observer.add_sample_lines("a", data, 0.0)) == [(status, f"a GPU 5: {words}")]
    assert bool(observer.find_unhealthy_nodes(["a", "b"])) is (status == "FAIL")


@pytest.mark.parametrize(
    ("health", "statuses"),
    [
        pytest.param({}, ["FAIL"], id="told"),
        pytest.param({"ignore": ("gpu.lost@a",)}, [], id="ignored"),
        pytest.param({"severity": {"gpu.lost": "warn"}}, ["WARN"], id="taken lightly"),
    ],
)
def test_the_cluster_file_has_the_last_word(health: dict[str, Any], statuses: list[str]) -> None:
    observer = HealthObserver(spec(**health))
    assert [event.status for event in observer.add_sample_lines("a", line(0.0, **LOST), 0.0)] == statuses
    assert list(observer.find_unhealthy_nodes(["a"])) == (["a"] if "FAIL" in statuses else [])


def test_a_new_controller_tells_only_what_nobody_was_told() -> None:
    first = HealthObserver(spec())
    told = first.add_sample_lines("a", row(0, 120, **HOT), 0.0)
    data = row(0, 120, **HOT) + line(120.0, xids=[(0, 79)], **HOT)
    state = state_with(told)
    second = HealthObserver(spec())
    new = second.replay_samples("a", data, state.troubles.values(), 0.0)
    assert [event.check for event in new] == ["gpu.xid"]
    assert set(second.find_unhealthy_nodes(["a"])) == {"a"}


def test_what_ended_while_nobody_watched_is_told_by_the_new_controller() -> None:
    told = HealthObserver(spec()).add_sample_lines("a", row(0, 120, **HOT), 0.0)
    state = state_with(told)
    new = HealthObserver(spec()).replay_samples("a", row(0, 120, **HOT) + row(120, 300), state.troubles.values(), 0.0)
    assert [event.status for event in new] == ["PASS"]
    assert state_with([*told, *new]).troubles == {}


def test_silence_counts_only_while_the_node_could_be_heard() -> None:
    observer = HealthObserver(spec())
    observer.add_sample_lines("a", line(0.0), now=0.0)
    assert observer.find_silent_nodes([], now=500.0) == []
    assert observer.find_silent_nodes(["a"], now=600.0) == []
    assert said(observer.find_silent_nodes(["a"], now=630.0)) == [("WARN", "a: no sample of GPUs and host for 2.2 min")]
    assert said(observer.add_sample_lines("a", line(800.0), now=640.0)) == [("PASS", "a: samples again")]


def ended(
    unhealthy: dict[str, str],
    spares: int,
    *,
    on: tuple[str, ...] = ("crash",),
    degraded: dict[str, str] | None = None,
) -> object:
    nodes = {n: NodeState(node=n, node_rank=i, swept=True) for i, n in enumerate("ab")}
    worker = WorkerState(rank=0, local_rank=0, node="a", phase=WorkerPhase.EXITED, exit_code=1)
    state = RunState(attempt=0, phase=RunPhase.STOPPING, reason="peer_failed", nodes=nodes, workers={0: worker})
    limits = next_action.RunLimits(restart=RestartSpec(max_restarts=3, on=on))
    return next_action.decide_action(
        state,
        limits,
        next_action.RunObservations(silent_s={}, unhealthy=unhealthy, degraded=degraded or {}, spare_count=spares),
        100.0,
    )


def test_a_node_that_is_to_be_drained_is_left_out_of_the_next_attempt_and_condemned_for_nothing() -> None:
    observer = HealthObserver(spec())
    observer.add_sample_lines("b", line(0.0, recovery_action=4), 0.0)
    why = {"b": "GPU 5: the driver recommends: drain and reset"}
    assert (observer.find_unhealthy_nodes(["a", "b"]), observer.find_degraded_nodes(["a", "b"])) == ({}, why)
    action = ended({}, 1, degraded=why)
    assert isinstance(action, next_action.Restart)
    assert action.excluded == ("b",)


def test_of_two_that_are_better_left_out_the_condemned_one_goes_first() -> None:
    action = ended({"b": "GPU 5: GPU is lost"}, 1, degraded={"a": "GPU 5: the driver recommends: drain and reset"})
    assert isinstance(action, next_action.Restart)
    assert action.excluded == ("b",)


@pytest.mark.parametrize(
    ("spares", "without"),
    [
        pytest.param(1, ("b",), id="a spare takes its place"),
        pytest.param(0, (), id="better a sick node than no run"),
    ],
)
def test_a_restart_leaves_a_sick_node_out_where_it_can(spares: int, without: tuple[str, ...]) -> None:
    action = ended({"b": "GPU 5: GPU is lost"}, spares)
    assert isinstance(action, next_action.Restart)
    assert action.excluded == without


def test_memory_that_is_held_makes_a_node_unfit_for_the_next_attempt_only() -> None:
    state = state_with([])
    alarm = node_events.Alarm(-1, node_events.GPU_MEMORY, "3.0 of 80 GiB still in use, held by pid 7", gpu=2)
    state = apply_node_event(state, "a", node_events.Stamp(1, 0.0, 0.0, "boot"), alarm)
    assert state.nodes["a"].gpu_memory_held == "GPU 2: 3.0 of 80 GiB still in use, held by pid 7"
    entries = [{"node": n, "node_rank": i, "ranks": [i]} for i, n in enumerate("ab")]
    begun = controller_events.AttemptStarted(attempt=0, world_size=2, master_addr=None, master_port=None, nodes=entries)
    assert apply_controller_event(state, 0.0, begun).nodes["a"].gpu_memory_held is None


def test_troubles_of_a_node_that_was_replaced_are_no_longer_shown() -> None:
    trouble = controller_events.HealthChanged(
        node="a", gpu=5, check="gpu.lost", key="gpu.lost", status="FAIL", message="a GPU 5: lost"
    )
    state = state_with([trouble, replace(trouble, node="b")])
    entries = [{"node": "b", "node_rank": 0, "ranks": [0]}]
    begun = controller_events.AttemptStarted(attempt=1, world_size=1, master_addr=None, master_port=None, nodes=entries)
    assert [event.node for event in apply_controller_event(state, 0.0, begun).troubles.values()] == ["b"]
