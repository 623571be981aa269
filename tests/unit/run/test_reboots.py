"""A node that went down under a run of this head is told apart from one that somebody booted between runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from clusterctl.run.record import health_history
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events as head

if TYPE_CHECKING:
    from pathlib import Path


def clock(boot: str, node: str = "n") -> head.ClockEstimated:
    return head.ClockEstimated(node=node, offset=0.0, error=0.001, boot=boot)


def link(word: str, *, rebooted: bool = False) -> head.LinkChanged:
    return head.LinkChanged(node="n", link=word, rebooted=rebooted)


@pytest.mark.parametrize(
    ("events", "fell"),
    [
        ([], False),
        ([clock("old")], False),
        ([clock("now"), link("unreachable")], False),
        ([clock("old"), link("unreachable")], True),
        ([clock("old"), link("unreachable"), link("lost")], True),
        ([clock("old"), link("unreachable"), link("connected")], False),
        ([clock("old"), link("unreachable"), link("lost", rebooted=True), clock("now"), link("connected")], True),
        ([clock("old"), link("lost", rebooted=True), clock("between"), link("connected")], False),
        ([clock("now"), clock("now")], False),
    ],
    ids=[
        "no run",
        "booted after the run",
        "the network was gone, the boot is the same",
        "gone, and booted since",
        "given up, and booted since",
        "the network was gone, booted after the run",
        "back in the same run",
        "back in the same run, and booted again after it",
        "nothing happened",
    ],
)
def test_a_node_went_down_under_a_run(events: list[head.ControllerEvent], fell: bool) -> None:
    assert health_history.find_rebooted_nodes([(float(i), event) for i, event in enumerate(events)], {"n": "now"}) == (
        {"n"} if fell else set()
    )


def test_the_newest_run_is_named_and_journals_of_long_ago_are_not_read(tmp_path: Path) -> None:
    runs = []
    for number, (boot, when) in enumerate([("old", 900.0), ("old", 1100.0), ("old", 1200.0), ("now", 1300.0)]):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        lines = [head.encode(i, when, event) for i, event in enumerate([clock(boot), link("lost")])]
        (folder / "events.jsonl").write_text("\n".join(["torn", *lines]))
        os.utime(folder / "events.jsonl", (when, when))
        runs.append(RunDir(folder))

    assert health_history.find_recent_reboots(runs, {"n": "now", "other": "x"}, 1000.0) == {"n": "run-2"}
    assert health_history.find_recent_reboots(runs[:1], {"n": "now"}, 1000.0) == {}
