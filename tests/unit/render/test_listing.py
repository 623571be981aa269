"""The table of runs: when each began, how long it took, and why it ended."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime

import pytest

from clusterctl.render.console import Terminal
from clusterctl.render.run_list import ps_hints, render_ps, sort_runs
from clusterctl.render.status_report import RunSnapshot, WorkerActivity
from clusterctl.run.rules import outcome
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.state import NodeState, RunPhase, RunState


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


NOW = at("2026-03-10T22:59:00")
BEGAN = at("2026-03-10T22:53:56")
RUNNING = RunState(
    run="digits-k3x9",
    phase=RunPhase.RUNNING,
    attempt=0,
    world_size=4,
    nodes={name: NodeState(node=name, node_rank=rank) for rank, name in enumerate(("gpu01", "gpu02"))},
    created=BEGAN,
)
ENDED = replace(RUNNING, run="crash-gq4d", phase=RunPhase.FAILED, ended=BEGAN + 24, exit_code=100)
KILLED = Cause(kind="signal", node="gpu02", rank=1, signal="SIGKILL")
NO_KEY = Cause(kind="start_failed", message="4 host keys unknown")
LEFT = outcome.build_remaining_process("gpu02", None, outcome.NODE_LOST)


def terminal(width: int = 0) -> Terminal:
    return Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=width)


def view(state: RunState, **changes: object) -> RunSnapshot:
    activity = {0: WorkerActivity(step=10, last_progress_s=2.0)}
    return RunSnapshot(state=replace(state, **changes), has_controller=not state.is_over, activity=activity)  # type: ignore[arg-type]


def last_column(state: RunState, **changes: object) -> str:
    header, row = render_ps([view(state, **changes)], NOW, terminal())
    return row[header.index("WHY") :]


def test_a_run_that_goes_on_has_its_step_and_its_newest_progress() -> None:
    assert render_ps([view(RUNNING)], NOW, terminal()) == [
        "RUN          STATE    STARTED    TOOK  NODES  RANKS  STEP  PROGRESS  WHY",
        "digits-k3x9  running  22:53:56  5m04s      2      4    10  2.0s ago",
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param({"external_cause": KILLED}, "rank 1 on gpu02: killed by SIGKILL", id="a rank failed"),
        pytest.param({"external_cause": NO_KEY}, "4 host keys unknown", id="the start failed"),
        pytest.param({}, "exit 100", id="nobody knows why"),
        pytest.param({"phase": RunPhase.CANCELLED, "exit_code": 103}, "", id="a person ended it"),
        pytest.param({"phase": RunPhase.SUCCEEDED, "exit_code": 0}, "", id="it ended well"),
        pytest.param({"phase": RunPhase.SUCCEEDED, "attempt": 2}, "after 2 restarts", id="it ended well at last"),
        pytest.param({"remaining": (LEFT, LEFT)}, "may still run on gpu02; exit 100", id="something is left of it"),
    ],
)
def test_the_last_column_says_why_a_run_ended(changes: dict[str, object], why: str) -> None:
    assert last_column(ENDED, **changes) == why


@pytest.mark.parametrize(
    ("began", "shown"),
    [
        pytest.param("2026-03-10T00:00:01", "00:00:01", id="today"),
        pytest.param("2026-03-09T22:53:56", "03-09 22:53", id="yesterday"),
        pytest.param("2025-12-31T22:53:56", "2025-12-31", id="last year"),
    ],
)
def test_when_a_run_began_is_told_no_longer_than_it_must_be(began: str, shown: str) -> None:
    (row,) = render_ps([view(ENDED, created=at(began))], NOW, terminal(), header=False)

    assert f"failed  {shown} " in row


def test_the_newest_run_stands_first_and_starts_that_failed_aside() -> None:
    runs = [
        view(ENDED, run="old", created=1.0),
        view(ENDED, run="never", created=9.0, attempt=-1, external_cause=NO_KEY),
        view(ENDED, run="new", created=5.0),
        view(ENDED, run="broken", created=None, phase=RunPhase.UNREADABLE),
    ]

    ordered = sort_runs(runs)

    assert [run.state.run for run in ordered] == ["broken", "new", "old", "never"]
    assert ["not started" in line for line in render_ps(ordered, NOW, terminal(), header=False)] == [0, 0, 0, 1]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_on_no_terminal_an_id_or_a_reason_is_left_out(width: int) -> None:
    lines = render_ps([view(ENDED, external_cause=KILLED)], NOW, terminal(width))

    assert lines[1].startswith("crash-gq4d  failed")
    assert "rank 1" in lines[1]
    assert max(map(len, lines)) <= width


ALIKE = [
    pytest.param({"kind": "signal", "signal": "SIGKILL"}, "SIGKILL (rank 1 on", id="a signal"),
    pytest.param({"kind": "oom", "signal": "SIGKILL"}, "out of memory (rank 1", id="memory"),
    pytest.param({"kind": "exit", "exit_code": 1, "message": "ValueError: bad"}, "ValueError: bad", id="an error"),
    pytest.param({"kind": "exit", "exit_code": 3}, "exit code 3 (rank 1", id="a code"),
    pytest.param({"kind": "node_lost"}, "gpu-node-07 was lost", id="a node"),
    pytest.param({"kind": "time_limit"}, "the time limit was reached", id="a limit"),
]


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize(("cause", "told"), ALIKE)
def test_on_a_narrow_terminal_what_went_wrong_stands_before_where(
    width: int, cause: dict[str, object], told: str
) -> None:
    why = Cause(node="gpu-node-07", rank=1, **cause)  # type: ignore[arg-type]
    long = view(ENDED, run="resnet-q2w3", external_cause=replace(KILLED, node="a-node-whose-name-fills-a-line.example"))

    _, row = render_ps([long, view(ENDED, external_cause=why)], NOW, terminal(width), header=False)

    assert told in row


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_columns_make_room_for_ids_and_reasons_only_where_there_is_none(width: int) -> None:
    error = Cause(kind="exit", node="gpu02", rank=1, exit_code=1, message="FileNotFoundError: " + "no such file " * 9)
    long = view(ENDED, run="resnet50-sweep-q2w3", external_cause=error)
    header, row = render_ps([long], NOW, terminal(width))

    assert row.startswith("resnet50-sweep-q2w3  failed")
    assert "FileN" in row
    assert ("STARTED" in header, "STEP" in header) == (width >= 80, width >= 80)
    assert "RANKS" in render_ps([view(RUNNING)], NOW, terminal(80))[0]


def test_columns_with_nothing_in_them_make_room_first() -> None:
    error = Cause(kind="exit", node="gpu02", rank=1, exit_code=1, message="FileNotFoundError: no such file")
    without = RunSnapshot(state=replace(ENDED, external_cause=error), has_controller=False)

    header, _ = render_ps([without], NOW, terminal(72))

    assert "STEP" not in header
    assert "RANKS" in header


def test_nobody_is_told_twice_that_nothing_was_started() -> None:
    failed = Cause(kind="start_failed", message="4 checks failed; nothing was started")

    assert last_column(ENDED, external_cause=failed) == "4 checks failed"


def test_sizes_are_shown_where_they_are_known() -> None:
    header, row = render_ps([view(ENDED)], NOW, terminal(), sizes={"crash-gq4d": 229376})

    assert "SIZE" in header
    assert "224 KiB" in row


def test_one_command_ends_what_several_ended_runs_may_have_left_alive() -> None:
    left = [view(ENDED, run=run, remaining=(LEFT,)) for run in ("a-1", "b-2")]

    assert ps_hints([*left, view(ENDED), view(RUNNING)]) == [
        "hint: `clusterctl down a-1 b-2` ends what may still run of them"
    ]
