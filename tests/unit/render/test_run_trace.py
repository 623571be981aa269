"""The trace of a run: what each event becomes, and that slices of a track never overlap."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.protocol import events as node_events
from clusterctl.render.charts import TimelineEvent
from clusterctl.render.run_trace import build_run_trace
from clusterctl.render.trace_events import TraceBuilder, encode_trace
from clusterctl.run.record.sample_files import Curves
from clusterctl.run.rules import controller_events as head
from clusterctl.run.rules.state import NodeState, RunState

NODES = [{"node": "a", "node_rank": 0, "address": None, "ranks": [0]}]
BEGUN = (110.0, head.AttemptStarted(attempt=0, world_size=1, master_addr=None, master_port=None, nodes=NODES))
STATE = RunState(
    run="R", created=100.0, ended=200.0, placements=((0, "a", (0,)),),
    nodes={"a": NodeState(node="a", node_rank=0, clock_ahead_s=5.0)},
)  # fmt: skip


def stamp(wall: float) -> node_events.Stamp:
    return node_events.Stamp(seq=1, wall=wall, mono=0.0, boot="b")


def trace_of(*told: tuple[float, head.ControllerEvent], **more: Any) -> list[tuple[str, str, float, float, str]]:
    """Group, track, begin and duration (seconds since the start of the run) and name of every slice and instant."""
    nodes, timeline, curves = more.get("nodes", ()), more.get("timeline", ()), more.get("curves", Curves())
    events = build_run_trace(STATE, (told, nodes), timeline, curves, 500.0)
    assert json.loads(encode_trace(events))["traceEvents"] == events
    groups = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    tracks = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    return [
        (groups[e["pid"]], tracks[e["pid"], e["tid"]], e["ts"] / 1e6, e.get("dur", 0) / 1e6, e["name"])
        for e in events
        if e["ph"] in "Xi"
    ]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param([BEGUN], [("R", "attempts", 10.0, 90.0, "attempt 0")], id="an attempt lasts until the run ends"),
        pytest.param(
            [BEGUN, (150.0, head.RestartPlanned(attempt=1, why="crash", at=160.0)), (160.0, BEGUN[1])],
            [
                ("R", "attempts", 10.0, 40.0, "attempt 0"),
                ("R", "restarts", 50.0, 10.0, "restart: crash"),
                ("R", "attempts", 60.0, 40.0, "attempt 0"),
            ],
            id="a restart is between two attempts",
        ),
        pytest.param(
            [
                (150.0, head.StallChanged(attempt=0, phase="suspected", since_s=20.0)),
                (155.0, head.StallChanged(attempt=0, phase="confirmed", since_s=25.0)),
                (160.0, head.StallChanged(attempt=0, phase="none")),
            ],
            [("R", "stalls", 30.0, 25.0, "suspected"), ("R", "stalls", 55.0, 5.0, "confirmed")],
            id="a stall begins before it is suspected",
        ),
        pytest.param(
            [
                (101.0, head.LinkChanged(node="a", link="connected")),
                (140.0, head.LinkChanged(node="a", link="unreachable", seconds=10.0)),
            ],
            [("a", "link", 1.0, 29.0, "connected"), ("a", "link", 30.0, 70.0, "unreachable")],
            id="a link is gone since the last answer",
        ),
        pytest.param(
            [(104.0, head.StartStepProgress(name="sync", seconds=3.0, ended=True))],
            [("R", "start", 1.0, 3.0, "sync")],
            id="a step of the start",
        ),
        pytest.param(
            [
                (
                    110.0,
                    head.AttemptStarted(
                        attempt=1, world_size=1, master_addr=None, master_port=None,
                        newest_checkpoint="ckpt/a b.pt 105.5 12",
                    ),
                )
            ],
            [("R", "checkpoints", 5.5, 0.0, "ckpt/a b.pt"), ("R", "attempts", 10.0, 90.0, "attempt 1")],
            id="a checkpoint is where it was written",
        ),
    ],
)  # fmt: skip
def test_events_of_the_controller_become_slices(told: list[Any], expected: list[Any]) -> None:
    assert trace_of(*told) == expected


def test_times_of_a_node_are_corrected_by_its_clock() -> None:
    began = node_events.Started(attempt=0, rank=0, local_rank=0, pid=9, start_time=1)
    ended = node_events.Exited(attempt=0, rank=0, exit_code=1)

    found = trace_of(nodes=[("a", stamp(120.0), began), ("a", stamp(135.0), ended)])

    assert found == [("a", "rank 0", 15.0, 15.0, "attempt 0")]


def test_messages_are_instants_and_curves_are_counters_of_the_node_of_the_rank() -> None:
    curves = Curves(steps={0: [(130.0, 7.0)]}, machines={"gpu": {"a": [(130.0, 90.0)]}})

    assert trace_of(timeline=[TimelineEvent(time=120.0, label="warn: x", tone="warn")]) == [
        ("R", "messages", 20.0, 0.0, "warn: x")
    ]
    counters = [e for e in build_run_trace(STATE, ((), ()), (), curves, 500.0) if e["ph"] == "C"]
    assert [(e["name"], e["ts"], e["args"]) for e in counters] == [
        ("step of rank 0", 30e6, {"value": 7.0}),
        ("gpu", 30e6, {"value": 90.0}),
    ]


@given(st.lists(st.tuples(st.floats(0, 1000), st.sampled_from([None, "x", "y"]))))
def test_slices_of_a_track_never_overlap(changes: list[tuple[float, str | None]]) -> None:
    trace = TraceBuilder(0.0)
    for time, name in changes:
        trace.change_slice("g", "t", time, name)
    trace.end_slices(1000.0)
    slices = sorted((e["ts"], e["dur"]) for e in trace.events if e["ph"] == "X")

    assert len(slices) == sum(name is not None for _, name in changes)
    for (began, duration), (following, _) in itertools.pairwise(slices):
        assert began + duration <= following + 0.01
