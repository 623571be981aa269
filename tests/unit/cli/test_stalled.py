"""Where the ranks of a stalled run are is read from what was kept of it, however little that is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from clusterctl.cli.status_views import describe_stalled_ranks
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.state import RunState, WorkerState

if TYPE_CHECKING:
    from pathlib import Path

STATE = RunState(workers={rank: WorkerState(rank=rank, local_rank=rank, node="gpu01") for rank in (0, 1)})
DUMP = 'Current thread 0x00007f (most recent call first):\n  File "/w/train.py", line 21 in load\n'


def kept(rank: int) -> str:
    told = {"rank": rank, "pid": 7, "state": "S", "wchan": None, "source": "signal", "why": [], "stacks": DUMP}
    return json.dumps({**told, "main_thread": None, "inside": None, "children": [], "tail": []})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, [], id="nothing is kept"),
        pytest.param({"stall-1/rank-1.json": kept(1)}, ["rank 1 on gpu01 is in load (train.py:21)"], id="of one rank"),
        pytest.param(
            {"stall-1/rank-0.json": kept(0), "stall-2/gpu01.error": "x"}, ["rank 0 on gpu01 is in load (train.py:21)"],
            id="the newest that holds any",
        ),
        pytest.param(
            {"stall-1/rank-0.json": kept(0), "stall-1/rank-1.json": '{"sou'},
            ["rank 0 on gpu01 is in load (train.py:21)"],
            id="a file that is torn",
        ),
        pytest.param({"stall-1/rank-0.json": "[]"}, [], id="a file that says nothing"),
        pytest.param({"stall-1/rank-x.json": "{}"}, [], id="a file of no rank"),
    ],
)  # fmt: skip
def test_what_is_kept_of_a_stall_is_told(tmp_path: Path, files: dict[str, str], expected: list[str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert describe_stalled_ranks(RunDir(tmp_path), STATE) == expected
