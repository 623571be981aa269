from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from clusterctl.render.run_list import ps_json, render_ps
from clusterctl.render.stats_table import GpuStats, NodeStats, render_stats, stats_json
from clusterctl.render.status_report import (
    RunSnapshot,
    WorkerActivity,
    activity_from_sample,
    render_status,
    status_json,
)
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, StallState, WorkerPhase, WorkerState

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal


def running(ranks: int = 4) -> RunSnapshot:
    half = ranks // 2
    nodes = {
        name: NodeState(node=name, node_rank=i, address=f"10.0.0.{i + 1}", ranks=tuple(range(half * i, half * (i + 1))))
        for i, name in enumerate(("gpu01", "gpu02"))
    }
    workers = {
        rank: WorkerState(
            rank=rank, local_rank=rank % half, node=f"gpu0{1 + rank // half}", phase=WorkerPhase.RUNNING, pid=100 + rank
        )
        for rank in range(ranks)
    }
    state = RunState(
        run="digits-k3x9", name="digits", phase=RunPhase.RUNNING, attempt=0, world_size=ranks, nodes=nodes,
        workers=workers, created=1000.0,
    )  # fmt: skip
    activity = {r: WorkerActivity(step=10 + r, last_output_s=0.5, last_progress_s=2.0 + r) for r in range(ranks)}
    return RunSnapshot(state=state, has_controller=True, activity=activity)


def test_status_has_the_agreed_keys() -> None:
    value = json.loads(json.dumps(status_json(running())))
    assert set(value) == {
        "run", "name", "state", "attended", "attempt", "exit_code", "cause", "health", "idle_since", "stall", "remaining",
        "warnings", "results", "started", "ended", "origin", "start", "goodput", "attempts", "nodes", "workers",
    }  # fmt: skip
    assert value["nodes"][1] == {
        "node": "gpu02", "node_rank": 1, "address": "10.0.0.2", "python": None, "image": None, "role": None, "state": "running",
    }  # fmt: skip
    assert value["workers"][3] == {
        "rank": 3, "local_rank": 1, "node": "gpu02", "pid": 103, "state": "running", "exit_code": None, "signal": None,
        "stopped": False, "step": 13, "last_output_s": 0.5, "slow": None,
    }  # fmt: skip


def test_cause_and_stall_have_the_agreed_keys() -> None:
    view = running()
    stall = StallState(phase="confirmed", since_s=500.0, limit_s=480.0, reason="no step", at=1.0)
    view = replace(view, state=replace(view.state, stall=stall, external_cause=Cause(kind="exit", rank=1, exit_code=3)))
    value = status_json(view)
    assert set(value["cause"]) == {
        "kind", "node", "rank", "exit_code", "signal", "message", "traceback", "certain",
    }  # fmt: skip
    assert value["stall"] == {"since_s": 500.0, "limit_s": 480.0, "phase": "confirmed", "verdict": None}


@pytest.mark.parametrize(
    ("pythons", "lines"),
    [
        pytest.param(["/e/py1/bin/python"] * 2, ["  python /e/py1/bin/python"], id="one on all nodes"),
        pytest.param(
            ["/e/py1/bin/python", "/usr/bin/python3"],
            ["  python /e/py1/bin/python on gpu01", "  python /usr/bin/python3 on gpu02"],
            id="two",
        ),
        pytest.param(["", ""], [], id="before the nodes are prepared"),
    ],
)
def test_status_shows_the_python_of_the_ranks(pythons: list[str], lines: list[str], narrow: Terminal) -> None:
    view = running()
    nodes = {
        name: replace(node, python=path) for (name, node), path in zip(view.state.nodes.items(), pythons, strict=True)
    }
    view = replace(view, state=replace(view.state, nodes=nodes))

    assert [line for line in render_status(view, 1192.0, narrow) if "python" in line] == lines
    assert [node["python"] or "" for node in status_json(view)["nodes"]] == pythons


def stalled(phase: str, since_s: float, limit_s: float) -> RunSnapshot:
    view = running()
    stall = StallState(phase=phase, since_s=since_s, limit_s=limit_s, reason="no progress", at=1.0)
    return replace(view, state=replace(view.state, stall=stall))


@pytest.mark.parametrize(
    ("phase", "since_s", "text"),
    [
        pytest.param("suspected", 40.0, "no progress for 40 s (limit 60 s)", id="suspected"),
        pytest.param("confirmed", 75.0, "stalled: no progress for 75 s (limit 60 s)", id="confirmed"),
        pytest.param("confirmed", 600.0, "stalled: no progress for 10 min (limit 60 s)", id="long"),
    ],
)
def test_ps_and_status_say_how_long_nothing_has_moved(
    phase: str, since_s: float, text: str, narrow: Terminal, pipe: Terminal
) -> None:
    view = stalled(phase, since_s, 60.0)
    assert render_ps([view], 1192.0, pipe)[1].endswith(text.removeprefix("stalled: "))
    assert f"  {text}" in render_status(view, 1192.0, narrow)


def test_status_says_how_to_look_at_a_stall_how_to_end_it_and_how_to_declare_work(narrow: Terminal) -> None:
    hints = [line for line in render_status(stalled("confirmed", 75.0, 60.0), 1192.0, narrow) if "hint:" in line]
    assert "`clusterctl stacks digits-k3x9`" in hints[0]
    assert "`clusterctl down --stalled`" in hints[0]
    assert "clusterctl.phase" in hints[1]


def test_ps_has_the_agreed_keys() -> None:
    assert ps_json([running()]) == [
        {
            "run": "digits-k3x9", "name": "digits", "state": "running", "idle_since": None, "stall": None,
                "attended": True, "attempt": 0,
            "nodes": 2, "world_size": 4, "started": "1970-01-01T00:16:40.000Z", "ended": None, "step": 10,
            "last_progress_s": 2.0, "exit_code": None, "cause": None, "remaining": [], "file": None,
            "not_started": False,
        }
    ]  # fmt: skip


def test_ps_says_when_and_of_what_a_run_ended_and_what_file_it_came_from() -> None:
    lost = Cause(kind="node_lost", node="gpu02", rank=2, message="node lost: no answer", certain=True)
    over = replace(
        running().state, phase=RunPhase.LOST, ended=1060.0, exit_code=105, external_cause=lost, path="/c.yaml"
    )
    (row,) = ps_json([replace(running(), state=over)])

    assert (row["ended"], row["file"]) == ("1970-01-01T00:17:40.000Z", "/c.yaml")
    assert (row["cause"]["kind"], row["cause"]["node"]) == ("node_lost", "gpu02")


def test_ps_tells_a_start_that_failed_from_a_run_that_did_as_its_table_does(pipe: Terminal) -> None:
    begun = replace(running().state, phase=RunPhase.FAILED, ended=1060.0, exit_code=100)
    views = [replace(running(), state=state) for state in (begun, replace(begun, attempt=-1))]

    assert [(row["state"], row["not_started"]) for row in ps_json(views)] == [("failed", False), ("failed", True)]
    assert ["not started" in line for line in render_ps(views, 1192.0, pipe)[1:]] == [False, True]


def test_status_shows_run_nodes_and_workers(narrow: Terminal) -> None:
    assert render_status(running(), 1192.0, narrow) == [
        "digits-k3x9  running · 2 nodes, 4 ranks · step 10 · 3m12s",
        "",
        "NODE   NODE RANK  STATE    RANKS  ADDRESS",
        "gpu01          0  running  0-1    10.0.0.1",
        "gpu02          1  running  2-3    10.0.0.2",
        "",
        "RANK  NODE   LOCAL RANK  PID  STATE    STEP    OUTPUT",
        "   0  gpu01           0  100  running    10  0.5s ago",
        "   1  gpu01           1  101  running    11  0.5s ago",
        "   2  gpu02           0  102  running    12  0.5s ago",
        "   3  gpu02           1  103  running    13  0.5s ago",
    ]


@pytest.mark.parametrize(
    ("losses", "lines"),
    [
        pytest.param([], [], id="none"),
        pytest.param([2.0], [], id="one"),
        pytest.param([3.0, 2.0, 1.0], ["  loss 3 → 1 █▅▁  `clusterctl plot digits-k3x9`"], id="three"),
        pytest.param([1.0, 1.0], ["  loss 1 → 1 ▁▁  `clusterctl plot digits-k3x9`"], id="constant"),
    ],
)
def test_status_has_a_line_of_the_losses(losses: list[float], lines: list[str], narrow: Terminal) -> None:
    shown = render_status(replace(running(), losses=losses), 1192.0, narrow)
    assert [line for line in shown if "loss" in line] == lines


def test_every_screen_says_of_which_attempt_a_step_is(pipe: Terminal, narrow: Terminal) -> None:
    view = replace(running(), state=replace(running().state, attempt=2))

    assert "step 10 (attempt 2)" in render_status(view, 1192.0, narrow)[0]
    assert "  10 (attempt 2)  " in render_ps([view], 1192.0, pipe)[1]
    assert "(attempt" not in render_ps([view], 1192.0, narrow)[1]


def test_many_workers_fold_by_what_they_do(narrow: Terminal) -> None:
    assert render_status(running(64), 1192.0, narrow)[-2:] == [
        "RANKS  STATE     STEP  NODES",
        "0-63   running  10-73  gpu[01-02]",
    ]


def test_many_workers_have_a_row_each_for_who_wants_that(narrow: Terminal) -> None:
    assert len(render_status(running(64), 1192.0, narrow, all_rows=True)[-64:]) == 64
    assert render_status(running(64), 1192.0, narrow, all_rows=True)[-1].startswith("  63  gpu02")


def test_a_run_without_controller_names_the_way_to_adopt_it(narrow: Terminal) -> None:
    lines = render_status(replace(running(), has_controller=False), 1192.0, narrow)
    assert lines[1:3] == [
        "  no controller is alive; the run goes on",
        "  hint: clusterctl attach --adopt digits-k3x9",
    ]


def test_activity_comes_from_samples() -> None:
    sample = {"ranks": {"3": {"inside": {"step": 7, "progress_age_s": 1.0}}, "4": {"inside": None}}}
    assert activity_from_sample(sample, 2.0) == {
        3: WorkerActivity(step=7, last_progress_s=3.0),
        4: WorkerActivity(),
    }


NODES = [
    NodeStats(
        node="gpu01", time=0.0, cpu=12.3, mem=40.0,
        gpus=(
            GpuStats(gpu=0, util=97, mem_used=76 << 30, mem_total=80 << 30, temp_c=61, power_w=640.2),
            GpuStats(gpu=1),
        ),
    ),
    NodeStats(node="cpu01", time=0.0),
]  # fmt: skip


def test_stats_have_a_row_a_gpu(narrow: Terminal) -> None:
    assert render_stats(NODES, narrow) == [
        "NODE   CPU  MEM  GPU  UTIL           GPU MEMORY  TEMP  POWER",
        "gpu01  12%  40%    0   97%  76.0 GiB / 80.0 GiB  61 C  640 W",
        "                   1     -                    -     -      -",
        "cpu01    -    -    -     -                    -     -      -",
    ]


def test_stats_have_the_agreed_keys() -> None:
    (first, _) = stats_json(NODES)
    assert set(first) == {"node", "time", "status", "reason", "cpu", "mem", "gpus"}
    assert set(first["gpus"][0]) == {"gpu", "util", "mem_used", "mem_total", "temp_c", "power_w"}
