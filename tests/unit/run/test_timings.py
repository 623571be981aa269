"""Where the time of a start went: kept with its steps, and told with the slowest node of each."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from clusterctl.agent.protocol.run_files import INDEX_RECORD, format_index_path
from clusterctl.render.console import Terminal
from clusterctl.render.status_report import describe_slow_start, render_timings, timings_json
from clusterctl.run.nodes.fan_out import Progress
from clusterctl.run.record import rundir
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.start_durations import StartTimes, StepTime, read_start_times
from clusterctl.run.rules import controller_events
from tests.json_shapes import STATUS, check

CONNECT = controller_events.StartStepProgress(
    name="connect",
    seconds=9.0,
    ended=True,
    nodes={"a": 1.0, "b": 9.0},
    parts={"b": ("logging in", 8.0)},
)
LAYOUT = [{"node": name, "node_rank": i, "ranks": [i]} for i, name in enumerate("ab")]
ATTEMPT = controller_events.AttemptStarted(attempt=0, world_size=2, master_addr=None, master_port=None, nodes=LAYOUT)


@pytest.fixture
def run(tmp_path: Path) -> rundir.RunDir:
    """A run whose nodes wrote something 2 s and 3 s after its workers were started, and which was restarted later."""
    run = rundir.create_run_dir("demo", tmp_path)
    writer = RunDirWriter(run)
    writer.append(controller_events.RunCreated(run=run.run, name="demo", path="/c.yaml"), 100.0)
    writer.append(CONNECT, 109.0)
    writer.append(ATTEMPT, 110.0)
    writer.append(controller_events.ClockEstimated(node="a", offset=0.0, error=0.0, ahead=50.0), 110.5)
    writer.append(
        controller_events.StartStepProgress(name="start", seconds=0.5, ended=True, nodes={"a": 0.5, "b": 0.4}), 111.0
    )
    writer.append(controller_events.StartStepProgress(name="prepare", seconds=70.0, ended=True), 400.0)
    for node, moment in (("a", 162.0), ("b", 113.0)):
        writer.replicate(node, format_index_path(0, "ab".index(node)), 0, INDEX_RECORD.pack(10, moment))
    writer.close()
    return run


def test_each_step_of_the_first_start_is_told_with_its_nodes_and_then_the_first_output(run: rundir.RunDir) -> None:
    times = read_start_times(run)
    assert times is not None
    assert [(step.name, step.seconds, step.slowest) for step in times.steps] == [
        ("connect", 9.0, "b"),
        ("start", 0.5, "a"),
        ("first output", 3.0, "b"),
    ]
    assert times.seconds == 11.0


def test_the_table_names_the_slowest_node_and_what_it_was_waited_for(run: rundir.RunDir) -> None:
    times = read_start_times(run)
    assert times is not None
    lines = render_timings(times, Terminal(io.StringIO(), colour=False, live=False, unicode=True))
    assert lines[1].split("  ")[0] == "connect"
    assert "b 9.00 s (8.00 s: logging in)" in lines[1]
    assert lines[-1].split() == ["in", "all", "11.00", "s"]


def test_status_json_has_the_times_in_their_shape(run: rundir.RunDir) -> None:
    told = timings_json(read_start_times(run))
    check(STATUS["properties"]["start"], told)
    assert told is not None
    assert told["steps"][0]["longest"] == {"b": {"what": "logging in", "seconds": 8.0}}


def test_a_run_that_has_told_nothing_has_no_times(tmp_path: Path) -> None:
    assert read_start_times(rundir.create_run_dir("demo", tmp_path)) is None
    assert timings_json(None) is None


@pytest.mark.parametrize(("seconds", "told"), [(59.0, 0), (75.0, 1)])
def test_only_a_start_that_took_long_is_worth_a_line_of_why(seconds: float, told: int) -> None:
    step = StepTime(name="health", seconds=seconds - 5.0, nodes={"gpu07": seconds - 5.0, "gpu08": 1.0})
    lines = describe_slow_start(StartTimes(seconds=seconds, steps=(step,)))
    assert len(lines) == told
    assert all("to health, slowest gpu07" in line for line in lines)


def test_a_step_tells_at_its_end_how_long_each_node_took_and_with_what() -> None:
    posted: list[controller_events.ControllerEvent] = []
    step = Progress("connect", 2, posted.append)
    step.set_waiting("a", "connecting")
    step.set_waiting("b", "connecting")
    step.set_waiting("b", "logging in")
    step.finish_node("a")
    step.finish_node("b")
    step.end()
    last = posted[-1]
    assert isinstance(last, controller_events.StartStepProgress)
    assert list(last.nodes) == ["a", "b"]
    assert last.nodes["a"] <= last.nodes["b"] <= last.seconds + 0.001
    assert {node: what for node, (what, _) in last.parts.items()}.keys() == {"b"}
    assert all(not told.nodes for told in posted[:-1] if isinstance(told, controller_events.StartStepProgress))
