"""A mistake of ours in a start ends the start and not the controller: nobody would know how the run is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec
from clusterctl.run.controller.loop import Controller
from clusterctl.run.record.rundir import create_run_dir
from clusterctl.run.record.state_reader import load_state_and_attendance

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_bug_in_the_start_ends_the_start_by_its_name_and_leaves_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def dial(*_: object) -> NoReturn:
        raise ValueError("a mistake")

    run = create_run_dir("broken", tmp_path)
    spec = ClusterSpec(
        name="broken", path="/n", hosts=(HostSpec(name="a", host="a", workdir="/w"),), job=JobSpec(command=("true",))
    )

    code = Controller(run, spec, dial).start()

    state, attended = load_state_and_attendance(run)
    assert (code, state.phase.value, state.exit_code, attended) == (1, "failed", 1, False)
    assert state.error is not None
    assert state.error["message"] == "this is a bug of clusterctl: ValueError: a mistake"
    assert str(run.log) in state.error["hint"]
    assert "in dial" in capsys.readouterr().err
