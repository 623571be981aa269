"""`top` fits its terminal, whatever there is to show, and sorts by what is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.logs.safe_text import strip_colours
from clusterctl.render.console import ASCII, UNICODE, Terminal
from clusterctl.render.line_chart import render_trend
from clusterctl.render.line_wrapping import count_columns
from clusterctl.render.stats_table import GpuStats, NodeStats, describe_missing_values, stats_from_sample, stats_json
from clusterctl.render.status_report import RunSnapshot, WorkerActivity
from clusterctl.render.top_rows import SORTS, FoldLevel, Row, TableOrder, TopData, list_top_units, make_rows, sort_rows
from clusterctl.render.top_screen import render_bar, render_top
from clusterctl.run.rules.controller_events import HealthChanged
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, WorkerPhase, WorkerState

if TYPE_CHECKING:
    from tests.unit.render.conftest import Screen

GIB = 1024**3


def gpu(index: int, util: float | None = 50, **values: Any) -> GpuStats:
    known = {"mem_used": 8 * GIB, "mem_total": 80 * GIB, "temp_c": 60, "power_w": 300.0}
    return GpuStats(gpu=index, util=util, **{**known, **values})


def scene(nodes: int = 2, gpus: int = 2, workers: int = 2, troubles: int = 0, name: str = "gpu") -> TopData:
    names = [f"{name}{i:02}" for i in range(nodes)]
    ranks = {r: WorkerState(rank=r, local_rank=r % workers, node=names[r // workers]) for r in range(nodes * workers)}
    told: dict[tuple[str, int | None, str], HealthChanged] = {
        (names[0], i, "gpu.lost"): HealthChanged(
            node=names[0], gpu=i, check="gpu.lost", key="gpu.lost", status="FAIL", message=f"{names[0]} GPU {i}: lost"
        )
        for i in range(troubles)
    }
    state = RunState(
        run="r-1",
        phase=RunPhase.RUNNING,
        attempt=0,
        created=0.0,
        nodes={n: NodeState(node=n, node_rank=i) for i, n in enumerate(names)},
        workers=ranks,
        troubles=told,
    )
    activity = {r: WorkerActivity(step=100 + r, last_output_s=1.0) for r in ranks}
    stats = [
        NodeStats(node=n, time=9.0, cpu=10.0 * i, mem=5.0, gpus=tuple(gpu(k, util=10 * k + i) for k in range(gpus)))
        for i, n in enumerate(names)
    ]
    return TopData(nodes=stats, view=RunSnapshot(state=state, has_controller=True, activity=activity))


def rows_of(shown: TopData, level: FoldLevel = FoldLevel.RANKS) -> list[Row]:
    return make_rows(shown, list_top_units(shown), level, 10.0)


def picture(shown: TopData, terminal: Terminal, height: int = 24, order: TableOrder | None = None) -> list[str]:
    return render_top(shown, order or TableOrder(), 10.0, terminal, height)[0]


def test_a_rank_stands_beside_its_gpu(narrow: Terminal) -> None:
    lines = picture(scene(), narrow)
    assert lines[0].startswith("r-1  running")
    assert [line.split() for line in lines[2:5]] == [
        ["NODE", "RANK", "STATE", "STEP", "IT/S", "GPU", "UTIL", "GPU", "MEM", "TEMP", "POWER", "CPU"],
        ["gpu00", "0", "pending", "100", "-", "0", "0%", "8/80", "GiB", "60", "C", "300", "W", "0%"],
        ["gpu00", "1", "pending", "101", "-", "1", "▍", "10%", "8/80", "GiB", "60", "C", "300", "W", "0%"],
    ]
    assert lines[-1].startswith("q leave  f fold  sort: [node] rank")


@pytest.mark.parametrize("width", [60, 80])
def test_on_a_narrow_screen_a_failure_goes_on_in_the_next_line_and_every_key_is_named(
    new_screen: type[Screen], width: int
) -> None:
    failed = Cause(
        kind="exit", node="gpu02", rank=1, exit_code=1, message="ValueError: no rows in batch 20", certain=True
    )
    shown = scene()
    assert shown.view is not None
    over = replace(shown.view.state, phase=RunPhase.FAILED, external_cause=failed, exit_code=100)
    lines = picture(replace(shown, view=replace(shown.view, state=over)), new_screen(width=width).terminal)

    told = " ".join(" ".join(lines[:4]).split())
    assert "rank 1 on gpu02, exit code 1: ValueError" in told
    assert "no rows in batch 20" in told
    assert max(map(len, (*lines[:4], lines[-1]))) <= width
    assert set(SORTS) <= set(lines[-1].partition("sort: ")[2])


def test_what_a_rank_said_last_stands_beside_it_where_there_is_room(new_screen: type[Screen]) -> None:
    shown = replace(scene(), read_last_line=lambda rank: f"loss 0.{rank}", step_rates={0: 3.14, 1: 0.052})
    rows = [line.split() for line in picture(shown, new_screen(width=160).terminal)[3:5]]
    assert [row[-2:] for row in rows] == [["loss", "0.0"], ["loss", "0.1"]]
    assert [row[4] for row in rows] == ["3.1", "0.05"]


def test_the_state_of_workers_has_a_column_only_where_one_does_not_run(narrow: Terminal) -> None:
    shown = scene()
    assert shown.view is not None
    workers = {r: replace(w, phase=WorkerPhase.RUNNING) for r, w in shown.view.state.workers.items()}
    view = replace(shown.view, state=replace(shown.view.state, workers=workers))
    assert "STATE" not in picture(replace(shown, view=view), narrow)[2]


def test_how_old_the_numbers_are_stands_above_them(narrow: Terminal) -> None:
    assert picture(replace(scene(), ranks_sampled_at=6.0), narrow)[1] == "  ranks 4 s ago · machines 1 s ago"


def test_how_the_whole_goes_stands_above_the_table(narrow: Terminal) -> None:
    trends = {("gpu00", 0): [0.0, 50.0, 100.0], ("gpu00", 1): [100.0]}
    shown = replace(scene(nodes=1), step_rates={0: 2.0, 1: 2.0}, trends=trends)
    assert picture(shown, narrow)[1].startswith("  2.0 it/s · GPUs ▁▅█ 100% · ")


def test_in_ascii_a_bar_is_a_bar(new_screen: type[Screen]) -> None:
    lines = picture(scene(), new_screen(width=80, unicode=False).terminal)
    assert all(line.isascii() for line in lines)
    assert [
        render_bar(50, 4, ASCII),
        render_bar(None, 4, ASCII),
        render_bar(99, 4, UNICODE),
        render_bar(500, 2, ASCII),
    ] == [
        "##..",
        "    ",
        "████",
        "##",
    ]
    assert render_trend([0, 50, 100], 2, ASCII) == "=#"


def test_gpus_that_the_run_chose_are_given_to_its_ranks_in_order() -> None:
    shown = scene(nodes=1, gpus=4)
    rows = rows_of(TopData(nodes=shown.nodes, view=shown.view, gpus_by_node={"gpu00": (3, 1)}))
    pairs = [(leaf.gpu and leaf.gpu.gpu, leaf.worker and leaf.worker.rank) for row in rows for leaf in row.units]
    assert pairs == [(3, 0), (1, 1), (0, None), (2, None)]


def test_a_run_without_gpus_leaves_their_columns_out(narrow: Terminal) -> None:
    header = picture(scene(gpus=0), narrow)[2]
    assert header.split() == ["NODE", "RANK", "STATE", "STEP", "IT/S", "CPU", "MEM", "OUTPUT"]


def test_machines_without_a_run_are_shown_alone(narrow: Terminal) -> None:
    lines = picture(TopData(nodes=scene().nodes, title="cluster.yaml: no active run"), narrow)
    assert lines[0] == "cluster.yaml: no active run"
    assert lines[2].split() == ["NODE", "GPU", "UTIL", "GPU", "MEM", "TEMP", "POWER", "CPU", "MEM"]


@pytest.mark.parametrize("key", SORTS)
def test_every_key_sorts_both_ways_and_what_is_unknown_comes_last(key: str) -> None:
    shown = replace(scene(nodes=3), step_rates={r: 1.0 + r for r in range(6)})
    blind = NodeStats(node="dead", time=None, status="unknown", reason="no answer")
    rows = rows_of(replace(shown, nodes=[blind, *shown.nodes]))
    one = sort_rows(rows, TableOrder(column=SORTS[key]))
    other = sort_rows(rows, TableOrder(column=SORTS[key], is_reversed=True))
    assert sorted(row.index for row in one) == sorted(row.index for row in other) == list(range(len(rows)))
    if key != "n":
        assert one[-1].nodes[0].node == other[-1].nodes[0].node == "dead"


def test_the_busiest_gpu_comes_first() -> None:
    rows = sort_rows(rows_of(scene(nodes=3)), TableOrder(column="util"))
    assert [row.gpus[0].util for row in rows] == [12, 11, 10, 2, 1, 0]


def test_rows_that_do_not_fit_are_scrolled_to(narrow: Terminal) -> None:
    lines, order = render_top(scene(nodes=20), TableOrder(first_row=1000, fold_level=FoldLevel.RANKS), 10.0, narrow, 24)
    assert "gpu19" in lines[-2]
    assert lines[-1].startswith("21-40 of 40")
    assert order.first_row == 20


def test_ranks_that_have_no_room_are_folded_by_node(narrow: Terminal) -> None:
    lines = picture(scene(nodes=20), narrow)
    assert lines[1] == "  machines 1 s ago · a row a node"
    assert [line.split()[:4] for line in lines[3:5]] == [
        ["gpu00", "0-1", "pending", "100-101"],
        ["gpu01", "2-3", "pending", "102-103"],
    ]


def test_nodes_that_have_no_room_are_folded_where_they_are_alike(narrow: Terminal) -> None:
    shown = scene(nodes=200, gpus=0)
    lazy = [replace(n, time=-99.0) if n.node == "gpu07" else n for n in shown.nodes]
    activity = {r: WorkerActivity(step=500 if r // 2 != 11 else 3) for r in range(400)}
    assert shown.view is not None
    lines = picture(replace(shown, nodes=lazy, view=replace(shown.view, activity=activity)), narrow)
    assert [line.split()[:2] for line in lines[4:7]] == [
        ["gpu07", "14-15"],
        ["gpu11", "22-23"],
        ["gpu[00-06,08-10,12-199]", "0-13,16-21,24-399"],
    ]


def test_many_troubles_leave_room_for_the_table(narrow: Terminal) -> None:
    lines = picture(scene(troubles=9), narrow)
    assert "  6 more: `clusterctl status`" in lines
    assert any(line.startswith("NODE") for line in lines)


def test_a_long_name_costs_columns_before_it_costs_its_own_end(narrow: Terminal) -> None:
    lines = picture(scene(name="accelerator-rack7-"), narrow)
    assert lines[3].startswith("accelerator-rack7-00")
    assert "OUTPUT" not in lines[2]


@given(
    st.integers(0, 9), st.integers(0, 9), st.integers(1, 8), st.integers(0, 9), st.integers(20, 200), st.integers(6, 60)
)
def test_no_picture_is_larger_than_its_terminal(
    nodes: int, gpus: int, workers: int, troubles: int, width: int, height: int
) -> None:
    import io

    terminal = Terminal(io.StringIO(), colour=True, live=True, unicode=True, width=width)
    shown = scene(max(nodes, 1), gpus, workers, troubles)
    lines = picture(shown if nodes else TopData(nodes=[], title="x" * 300), terminal, height)
    assert len(lines) <= height
    # The first line of a run is short; a terminal narrower than the leanest table folds it, and nothing can be done.
    assert all(count_columns(strip_colours(line)) <= max(width, 75) for line in lines)


def test_a_sample_becomes_what_stats_prints() -> None:
    sample = {
        "t": 0.0,
        "cpu": 12.5,
        "mem": 40.0,
        "status": "ok",
        "reason": None,
        "gpus": [{"gpu": 0, "util": 97, "mem_used": 1, "mem_total": 2, "temp_c": 61, "power_w": 650.0, "sm_clock": 9}],
    }
    (told,) = stats_json([stats_from_sample("a", sample)])
    assert told == {
        "node": "a",
        "time": "1970-01-01T00:00:00.000Z",
        "status": "ok",
        "reason": None,
        "cpu": 12.5,
        "mem": 40.0,
        "gpus": [{"gpu": 0, "util": 97, "mem_used": 1, "mem_total": 2, "temp_c": 61, "power_w": 650.0}],
    }


def test_what_is_missing_and_what_is_old_is_said() -> None:
    nodes = [
        NodeStats(node="a", time=100.0, status="stuck", reason="the driver has not answered for 30 s"),
        NodeStats(node="b", time=100.0, status="absent", reason="there is no NVIDIA driver library"),
        NodeStats(node="c", time=None, status="unknown", reason="no sample yet"),
        NodeStats(node="d", time=10.0),
    ]
    assert describe_missing_values(nodes, 101.0) == [
        "a: the driver has not answered for 30 s",
        "c: no sample yet",
        "d: seen 1m31s ago",
    ]


def test_what_is_said_of_many_nodes_is_said_once() -> None:
    blind = [NodeStats(node=f"a{i}", time=None, status="unknown", reason="no sample yet") for i in range(3)]
    old = [NodeStats(node=f"b{i}", time=10.0 - i) for i in range(4)]
    assert describe_missing_values([*blind, *old], 101.0) == [
        "a[0-2]: no sample yet",
        "b[0-3]: seen 1m31s ago or longer",
    ]


def test_a_wide_screen_shows_everything(new_screen: type[Screen]) -> None:
    assert "OUTPUT" in picture(scene(name="accelerator-rack7-"), new_screen(width=200).terminal)[2]
