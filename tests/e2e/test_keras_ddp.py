"""The example's job on real process groups: what it says of its weights must be able to fail."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead

if not all(map(find_spec, ("torch", "keras", "sklearn"))):
    pytest.skip("needs torch, keras and scikit-learn", allow_module_level=True)

WRAPPER = Path(__file__).with_name("perturbed_keras_ddp.py")


@pytest.mark.torch
@pytest.mark.timeout(240)
def test_a_run_fails_when_one_weight_of_one_rank_differs_by_a_bit(head: LocalHead) -> None:
    job = {"script": str(WRAPPER), "args": ["--backend", "gloo", "--epochs", "1", "--min-accuracy", "0"]}
    head.write_local(job, workers=(1, 1), env={"OMP_NUM_THREADS": "1"})

    done = head.run("up", "--no-health", timeout=200)

    assert done.returncode == 100, done.stdout + done.stderr
    assert "error: weights differ" in done.stderr
    cause = head.json("status")["cause"]
    assert "weights differ" in cause["message"]
