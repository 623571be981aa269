"""Where runs lie on a head."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.run.record.rundir import find_runs_root


@pytest.mark.parametrize(
    ("state_home", "place"),
    [
        pytest.param("/scratch/state", "/scratch/state/clusterctl/runs", id="as the user says"),
        pytest.param(None, "/home/ann/.local/state/clusterctl/runs", id="below the home"),
        pytest.param("", "/home/ann/.local/state/clusterctl/runs", id="an empty word says nothing"),
    ],
)
def test_runs_lie_in_the_state_folder_of_the_user(
    monkeypatch: pytest.MonkeyPatch, state_home: str | None, place: str
) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    if state_home is not None:
        monkeypatch.setenv("XDG_STATE_HOME", state_home)

    assert find_runs_root() == Path(place)
