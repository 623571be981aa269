"""What run this is, in the first lines of `status`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from clusterctl.render.status_report import describe_commit, render_origin
from clusterctl.run.record.run_origin import Commit, Origin
from clusterctl.run.rules.state import RunState

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal

STATE = RunState(run="r-1", created=1000.0, ended=1300.0)
ORIGIN = Origin(
    user="uli",
    host="head",
    file="/home/uli/cluster.yaml",
    command="train.py --epochs 3",
    commit=Commit(commit="3f2a1c07b9d4"),
)


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        pytest.param(
            ORIGIN,
            [
                "  started TIME (2h00m ago) by uli@head · ended TIME",
                "  train.py --epochs 3",
                "  /home/uli/cluster.yaml · commit 3f2a1c07b9",
            ],
            id="all of it",
        ),
        pytest.param(None, [], id="an older run"),
    ],
)
def test_a_run_says_who_began_it_when_and_with_what(pipe: Terminal, origin: Origin | None, expected: list[str]) -> None:
    lines = render_origin(STATE, origin, 8200.0, pipe)

    assert [re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", line) for line in lines] == expected


@pytest.mark.parametrize(
    ("commit", "expected"),
    [
        pytest.param(Commit(commit="3f", branch="main", changes=0), "commit 3f (main)", id="no change"),
        pytest.param(Commit(commit="3f", changes=1), "commit 3f + 1 change", id="one change"),
        pytest.param(Commit(commit="3f", changes=2), "commit 3f + 2 changes", id="two changes"),
    ],
)
def test_a_commit_is_told_with_what_differs_from_it(commit: Commit, expected: str) -> None:
    assert describe_commit(commit) == expected
