"""What is read of the samples of a run: few points, whatever there is."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clusterctl.render import charts
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import MANY_NODES, Curves, read_curves, thin_points
from clusterctl.validation import node_samples

GPUS = [
    {"gpu": 0, "util": 90.0, "mem_used": 10, "mem_total": 40, "temp_c": 60.0, "power_w": 300.0},
    {"gpu": 1, "util": 50.0, "mem_used": 30, "mem_total": 40, "temp_c": 70.0, "power_w": 200.0},
]


def activity(t: float, **steps: int) -> dict[str, Any]:
    ranks = {rank.removeprefix("r"): {"inside": {"step": step}} for rank, step in steps.items()}
    return {"kind": "activity", "t": t, "m": t, "attempt": 0, "ranks": ranks}


def read(folder: Path, lines: list[Any], *, ahead: float = 0.0) -> Curves:
    run = RunDir(folder / "run-aaaa")
    run.node("gpu01").mkdir(parents=True)
    written = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run.node("gpu01") / "samples.jsonl").write_text("".join(f"{line}\n" for line in written))
    return read_curves(run, {"gpu01": ahead})


def test_steps_of_each_rank_stand_on_the_clock_of_the_head(tmp_path: Path) -> None:
    found = read(tmp_path, [activity(100.0, r0=1, r1=2), activity(110.0, r0=3)], ahead=5.0)

    assert found.steps == {0: [(95.0, 1.0), (105.0, 3.0)], 1: [(95.0, 2.0)]}


def test_gpus_of_a_node_are_one_value_each(tmp_path: Path) -> None:
    found = read(tmp_path, [{"kind": "health", "t": 1.0, "cpu": 12.5, "mem": None, "gpus": GPUS}])

    assert {what: by["gpu01"][0][1] for what, by in found.machines.items()} == {
        "gpu": 70.0,
        "gpu memory": 75.0,
        "temperature": 70.0,
        "power": 500.0,
        "cpu": 12.5,
    }


@pytest.mark.parametrize(
    "line", ["", "{", "[]", '{"kind": "activity"}', '{"kind": "activity", "t": "x", "ranks": {"0": 1}}'], ids=ascii
)
def test_lines_that_are_no_samples_are_left_out(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, [line, activity(1.0, r0=1)]).steps == {0: [(1.0, 1.0)]}


def test_of_long_samples_pieces_of_all_their_time_are_read(tmp_path: Path) -> None:
    lines = [activity(float(t), r0=t) for t in range(40_000)]

    points = read(tmp_path, lines).steps[0]

    assert len(points) == 200
    assert points[0][0] < 200.0
    assert points[-1][0] == 39_999.0
    assert max(later - earlier for (earlier, _), (later, _) in pairwise(points)) < 250.0


def test_of_many_nodes_fewer_samples_are_read_over_all_their_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run-aaaa")
    nodes = [f"gpu{number}" for number in range(MANY_NODES + 1)]
    for node in nodes:
        run.node(node).mkdir(parents=True)
        lines = [json.dumps(activity(float(t), r0=t)) for t in range(1000)]
        (run.node(node) / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines))

    few, many = (read_curves(run, dict.fromkeys(some, 0.0)).steps[0] for some in (nodes[:1], nodes))

    assert (len(few), few[-1][0]) == (200, 999.0)
    assert (many[0][0], many[-1][0]) == (0.0, 999.0)
    assert MANY_NODES == charts.MAX_CURVES, "of so many a picture shows the lowest, the middle and the highest"


def test_the_slowest_rank_is_the_one_that_was_behind_when_it_was_last_seen(tmp_path: Path) -> None:
    found = read(tmp_path, [activity(1.0, r0=90, r1=80), activity(5.0, r0=3, r1=4), activity(6.0, r1=7)])

    assert [found.find_slowest_step(began) for began in (None, 4.0, 5.5, 7.0)] == [3, 3, 7, None]


def test_a_node_without_samples_has_no_curves(tmp_path: Path) -> None:
    assert read_curves(RunDir(tmp_path), {"gpu01": 0.0}) == Curves()


def test_thinned_points_keep_the_first_and_the_last() -> None:
    found = thin_points([(float(n), 0.0) for n in range(1000, 0, -1)], 10)

    assert (len(found), found[0][0], found[-1][0]) == (10, 1.0, 1000.0)


def sampled(**changes: Any) -> dict[str, Any]:
    """A sample of two ranks, as nodes write it; `changes` go into what the first one's worker says."""
    told = {"pid": 7, "step": 3, "source": "torch", "beats": 3, "seq": {"0": [3, 3]}, "facts": {}, **changes}
    rank = {"alive": True, "pid": 7, "state": "S", "wchan": "futex_do_wait", "inside": told}
    ranks = {"8": rank, "9": {**rank, "inside": None}, "10": {**rank, "alive": False, "inside": {**told, "step": 4}}}
    return {"t": 12.25, "m": 1.5, "gpus": True, "ranks": ranks, "attempt": 0, "kind": "activity"}


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["as nodes write", "otherwise"])
@pytest.mark.parametrize(
    ("changes", "reached"),
    [
        ({}, [(8, 3.0), (10, 4.0)]),
        ({"step": None}, [(10, 4.0)]),
        ({"step": -1}, [(8, -1.0), (10, 4.0)]),
        ({"source": '"9":{"alive":true,"inside":{"pid":1,"step":5,'}, [(8, 3.0), (10, 4.0)]),
        ({"facts": {"inside": {"pid": 1}}}, [(8, 3.0), (10, 4.0)]),
    ],
    ids=["a step", "none yet", "below zero", "a text that looks like a rank", "a fact of that name"],
)
def test_steps_are_found_however_a_line_is_written(
    separators: tuple[str, str], changes: dict[str, Any], reached: list[tuple[int, float]]
) -> None:
    line = json.dumps(sampled(**changes), separators=separators).encode()

    assert node_samples.parse_rank_steps(line) == (12.25, reached)


@pytest.mark.parametrize(
    "values",
    [
        {"t": "x"},
        {"t": True, "cpu": []},
        {"t": float("nan")},
        {"t": 1.0, "gpus": 3},
        {"t": 1.0, "gpus": [{"util": "much"}]},
        {"t": 1.0, "gpus": [{"mem_used": 1, "mem_total": [2]}]},
        {"t": 1.0, "cpu": 10**400},
        {"cpu": 1.0},
    ],
    ids=ascii,
)
def test_a_sample_of_a_machine_with_what_is_no_number_is_left_out(values: dict[str, Any]) -> None:
    assert node_samples.parse_host_usage(json.dumps({**values, "kind": "health"}).encode()) is None
