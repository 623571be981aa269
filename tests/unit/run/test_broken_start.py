"""A bug in the start ends the controller: a start that nobody ends would look like a slow one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest

from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec
from clusterctl.run.controller import Controller
from clusterctl.run.store import create, visible_state

if TYPE_CHECKING:
    from pathlib import Path


def test_a_bug_in_the_start_ends_the_controller_and_the_run_has_failed(tmp_path: Path) -> None:
    def dial(*_: object) -> NoReturn:
        raise ValueError("a bug")

    run = create("broken", tmp_path)
    spec = ClusterSpec(name="broken", path="/n", hosts=(HostSpec(name="a", host="a"),), job=JobSpec(command=("true",)))
    with pytest.raises(ValueError, match="a bug"):
        Controller(run, spec, lambda _inbox: dial).start()
    state, attended = visible_state(run)
    assert (state.phase.value, state.exit_code, attended) == ("failed", 100, False)
