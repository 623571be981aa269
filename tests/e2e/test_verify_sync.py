"""verify_sync on real process groups (gloo)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if not all(map(find_spec, ("torch", "keras"))):
    pytest.skip("needs torch and keras", allow_module_level=True)

PROBE = Path(__file__).parent / "templates_support" / "sync_probe.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PREFIX = "weights are not the same on all ranks at step 7: "

CASES = [
    pytest.param("equal", "same", id="equal-weights-pass"),
    pytest.param(
        "one-bit", PREFIX + "rank 2 differs from the other 2, first in `2.bias`", id="one-bit-on-one-rank-is-named"
    ),
    pytest.param(
        "two-ranks",
        PREFIX + "ranks 1,2 differ from the other 1, first in `0.weight`",
        id="no-majority-blames-all-but-rank-0",
    ),
    pytest.param("nan", "same", id="nan-equals-nan"),
    pytest.param("buffers", "same", id="buffers-are-left-out"),
    pytest.param(
        "buffers-asked",
        PREFIX + "ranks 1,2 differ from the other 1, first in `1.running_mean`",
        id="buffers-are-compared-when-asked",
    ),
    pytest.param("keras-statistics", "same", id="keras-moving-statistics-are-left-out"),
]


def run_probe(*command: str) -> dict[str, str]:
    """Return the answers by "kind rank"."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=100, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """What three ranks said, for all cases in one run."""
    kinds = [str(case.values[0]) for case in CASES] + ["keras-weights"]
    return run_probe(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "--redirects", "0", str(PROBE), *kinds
    )


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "answer"), CASES)
def test_every_rank_is_told_the_same_answer(answers: dict[str, str], kind: str, answer: str) -> None:
    assert [answers[f"{kind} {rank}"] for rank in range(3)] == [answer] * 3


@pytest.mark.torch
def test_a_differing_keras_weight_is_named_by_its_layer(answers: dict[str, str]) -> None:
    assert answers["keras-weights 0"].startswith(PREFIX + "rank 1 differs from the other 2")
    assert "dense" in answers["keras-weights 0"]


@pytest.mark.torch
def test_without_a_process_group_nothing_is_checked() -> None:
    assert run_probe(str(PROBE), "equal") == {"equal 0": "same"}
