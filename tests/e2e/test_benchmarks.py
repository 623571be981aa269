"""A benchmark, and a checkout of the program, are measured beside what they are compared with."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.documented import REPOSITORY, typed
from tests.lab.lab import Lab

if TYPE_CHECKING:
    from pathlib import Path


def test_a_benchmark_is_measured_beside_what_it_is_compared_with() -> None:
    words = typed("python -m benchmarks NAME --rounds 5", NAME="config")
    done = subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )

    assert done.returncode == 0, done.stderr
    assert re.search(r"config -q of 200 hosts / import yaml, pydantic +[\d.]+ x +<= 4 +(met|NOT MET)", done.stdout)


@pytest.mark.skipif(bool(Lab.unavailable()), reason=f"no lab: {Lab.unavailable()}")
def test_a_checkout_is_measured_beside_another_one() -> None:
    words = typed("python -m benchmarks.beside CHECKOUT", CHECKOUT=str(REPOSITORY))
    done = subprocess.run(
        [sys.executable, *words, "--rounds", "1", "--only=--help"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert re.search(r"--help +wall +[\d.]+ x, least +[\d.]+ x +.* against .*n=1", done.stdout)


def test_what_is_no_checkout_is_not_measured(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.beside", str(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path} is no checkout of clusterctl" in done.stderr
