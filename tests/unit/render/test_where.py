"""Where the ranks of a stalled run are, in a few lines."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.render.stack_report import summarize_stacks

NODES = {0: "gpu01", 2: "gpu03"}
TORCH = "/opt/venv/lib/python3.11/site-packages/torch/autograd.py"


def entry(ranks: str, *frames: tuple[str, str, int], wchan: str | None = None) -> dict[str, Any]:
    stack = [{"function": function, "file": file, "line": line} for function, file, line in frames]
    return {"ranks": ranks, "source": "signal", "state": "S", "wchan": wchan, "frames": stack or None}


LOAD = entry("2", ("load", "/root/work/train.py", 21))
STEP = entry("0-1,3", ("backward", TORCH, 9), ("run", TORCH, 3), ("step", "/root/work/train.py", 26))


@pytest.mark.parametrize(
    ("folded", "expected"),
    [
        pytest.param(
            [STEP, LOAD],
            [
                "rank 2 on gpu03 is in load (train.py:21)",
                "ranks 0-1,3 are in backward, called by step (train.py:26)",
            ],
            id="few ranks first",
        ),
        pytest.param(
            [entry("0", ("run", TORCH, 3))], ["rank 0 on gpu01 is in run (autograd.py:3)"], id="a library alone"
        ),
        pytest.param([entry("0", wchan="futex")], ["rank 0 on gpu01 is in futex of the kernel"], id="no stack"),
        pytest.param([entry("7")], ["rank 7 is somewhere without a Python stack"], id="nothing known"),
        pytest.param(
            [entry(str(rank), ("f", "a.py", rank)) for rank in range(4, 9)],
            [*(f"rank {rank} is in f (a.py:{rank})" for rank in (4, 5, 6)), "and 2 other places"],
            id="many places",
        ),
        pytest.param([], [], id="none"),
    ],
)
def test_where_ranks_are(folded: list[dict[str, Any]], expected: list[str]) -> None:
    assert summarize_stacks(folded, NODES) == expected
