"""What becomes of a run without a controller is what its file says, and when one was last seen to live."""

from __future__ import annotations

import io
import os
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.protocol.run_files import SAMPLES_FILE
from clusterctl.cli.run_views import predict_unattended_run
from clusterctl.config.spec import ClusterSpec, ControllerLossSpec, HostSpec, JobSpec, dump_spec
from clusterctl.render.console import Terminal
from clusterctl.render.run_list import adoption_hints, render_ps
from clusterctl.render.run_messages import UnattendedOutlook, UnattendedRun, predict_unattended
from clusterctl.render.status_report import RunSnapshot, render_status
from clusterctl.run.record import rundir
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.rules.controller_events import RunCreated
from clusterctl.run.rules.state import RunPhase, RunState

if TYPE_CHECKING:
    from pathlib import Path

RUNNING = RunState(run="p3-dhs7", phase=RunPhase.RUNNING, attempt=0, created=1.0)
GONE = UnattendedRun(outlook=UnattendedOutlook.STOPPED, stop_after_s=15.0)


@pytest.mark.parametrize(
    ("silent", "told"),
    [
        pytest.param(4.0, "its nodes stop the workers in 11 s unless it is adopted", id="before"),
        pytest.param(-9.0, "its nodes stop the workers in 15 s unless it is adopted", id="a clock that was set back"),
        pytest.param(
            15.0, "its nodes stop the workers now (on_controller_loss.stop_after 15 s)", id="within the grace"
        ),
        pytest.param(
            35.0, "its nodes have stopped the workers by now (on_controller_loss.stop_after 15 s)", id="surely over"
        ),
    ],
)
def test_nodes_that_stop_without_a_controller_are_not_said_to_go_on(silent: float, told: str) -> None:
    assert predict_unattended(RunPhase.RUNNING, silent, 15.0, 35.0).message == told
    assert (
        predict_unattended(RunPhase.STALLED, silent, 15.0, 35.0).describe_error("p3-dhs7")
        == f"p3-dhs7 has no controller: {told}"
    )


def test_a_run_that_its_nodes_keep_goes_on() -> None:
    kept = predict_unattended(RunPhase.RUNNING, 1e6, None, None)

    assert (kept.message, kept.describe_error("p3-dhs7")) == ("the run goes on", "p3-dhs7 goes on without a controller")


def test_a_run_between_two_attempts_does_nothing_until_it_is_adopted() -> None:
    assert predict_unattended(RunPhase.RESTARTING, 1.0, None, None).message == "no worker runs until it is adopted"


def of_run(folder: Path, *, stop_after: float | None, silent: float) -> str:
    run = rundir.create_run_dir("demo", folder)
    with closing(RunDirWriter(run)) as writer:
        writer.append(RunCreated(run=run.run, name="demo", path=""), 1.0)
    samples = run.node("n1") / SAMPLES_FILE
    samples.parent.mkdir(parents=True)
    samples.touch()
    heard = samples.stat().st_mtime - silent
    os.utime(samples, (heard, heard))
    os.utime(run.events, (1.0, 1.0))
    spec = ClusterSpec(
        path="cluster.yaml",
        name="demo",
        hosts=(HostSpec(name="n1", host="n1"),),
        job=JobSpec(grace=10.0),
        on_controller_loss=None if stop_after is None else ControllerLossSpec(stop_after=stop_after),
    )
    run.spec.write_text(dump_spec(spec))
    return predict_unattended_run(run, RUNNING).message


def test_the_last_sign_of_a_controller_is_what_it_wrote_last(tmp_path: Path) -> None:
    assert of_run(tmp_path, stop_after=3600.0, silent=0.0).startswith("its nodes stop the workers in ")
    assert of_run(tmp_path, stop_after=900.0, silent=960.0).startswith("its nodes have stopped the workers by now")
    assert of_run(tmp_path, stop_after=None, silent=960.0) == "the run goes on"


def test_status_tells_it_with_the_way_to_adopt_the_run() -> None:
    terminal = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=80)
    view = RunSnapshot(state=RUNNING, has_controller=False, unattended_run=GONE)

    assert render_status(view, 2.0, terminal)[1:3] == [
        "  no controller is alive; its nodes have stopped the workers by now (on_controller_loss.stop_after 15 s)",
        "  hint: clusterctl attach --adopt p3-dhs7",
    ]


@pytest.mark.parametrize("width", [40, 80])
def test_the_command_that_adopts_a_run_stands_below_the_table_whole(width: int) -> None:
    terminal = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=width)
    view = RunSnapshot(state=replace(RUNNING, world_size=4), has_controller=False, unattended_run=GONE)
    (row,) = render_ps([view], 40.0, terminal, header=False)

    assert "unattended: stopped" in row
    assert adoption_hints([view]) == ["hint: `clusterctl attach --adopt p3-dhs7` starts a new controller"]
    assert adoption_hints([view, view]) == ["hint: `clusterctl attach --adopt RUN` starts a new controller"]
    assert adoption_hints([replace(view, has_controller=True)]) == []
