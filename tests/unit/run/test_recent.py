"""What a node told lately, taken in as it comes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.protocol import run_files
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import NodeStats

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "r-1")
    made.node("a").mkdir(parents=True)
    return made


def active(moment: float, step: int, attempt: int = 0) -> dict[str, Any]:
    ranks = {"3": {"alive": True, "inside": {"step": step}}}
    return {"t": moment, "m": moment, "attempt": attempt, "kind": "activity", "ranks": ranks}


def measured(moment: float, util: float) -> dict[str, Any]:
    return {
        "t": moment,
        "m": moment,
        "attempt": 0,
        "kind": "health",
        "cpu": util / 2,
        "gpus": [{"gpu": 0, "util": util}],
    }


def write(run: RunDir, *samples: dict[str, Any], end: str = "") -> None:
    with (run.node("a") / run_files.SAMPLES_FILE).open("a") as file:
        file.write("".join(json.dumps(sample, separators=(",", ":")) + "\n" for sample in samples) + end)


def test_speed_and_trend_follow_from_samples(run: RunDir) -> None:
    write(run, active(0.0, 10), active(5.0, 15), measured(5.0, 40.0), active(10.0, 30), measured(20.0, 90.0))
    recent = NodeStats(run, "a")
    recent.refresh()
    assert recent.steps_per_s(3) == 2.0
    assert recent.steps_per_s(4) is None
    assert (list(recent.list_utilisation(0)), list(recent.list_utilisation())) == ([40.0, 90.0], [20.0, 45.0])


def test_what_comes_later_is_taken_in_and_a_torn_line_waits_for_its_end(run: RunDir) -> None:
    recent = NodeStats(run, "a")
    recent.refresh()
    late = json.dumps(active(10.0, 40), separators=(",", ":"))
    write(run, active(0.0, 10), end=late[:20])
    recent.refresh()
    assert recent.steps_per_s(3) is None
    write(run, end=late[20:] + "\n")
    recent.refresh()
    assert recent.steps_per_s(3) == 3.0


def test_speed_is_that_of_the_last_two_minutes(run: RunDir) -> None:
    write(run, active(0.0, 0), active(1000.0, 10), active(1100.0, 110))
    recent = NodeStats(run, "a")
    recent.refresh()
    assert recent.steps_per_s(3) == 1.0


@pytest.mark.parametrize("later", [active(10.0, 0), active(10.0, 30, attempt=1)], ids=["step", "attempt"])
def test_speed_begins_anew_where_steps_do(run: RunDir, later: dict[str, Any]) -> None:
    write(run, active(0.0, 10), active(5.0, 20), later)
    recent = NodeStats(run, "a")
    recent.refresh()
    assert recent.steps_per_s(3) is None


def test_of_a_long_file_the_end_is_read_and_few_samples_of_it(run: RunDir) -> None:
    write(run, *(active(float(second), 2 * second) for second in range(5000)), *(measured(1.0, 1.0) for _ in range(30)))
    recent = NodeStats(run, "a", max_first=4)
    recent.refresh()
    assert (recent.steps_per_s(3), len(recent.list_utilisation(0))) == (2.0, 4)


def test_lines_that_are_no_samples_are_left_out(run: RunDir) -> None:
    write(run, {"kind": "activity", "m": "x", "ranks": {}}, {"kind": "health"}, end='"activity"\n"health" \x00\n')
    recent = NodeStats(run, "a")
    recent.refresh()
    assert (recent.activity, recent.health) == (None, None)
