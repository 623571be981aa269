"""A run of 200 nodes with 8 ranks each fits a screen, whatever is asked about it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from benchmarks.screens import SCREENS
from clusterctl.cli.commands.metrics import MetricsSource
from tests.big_run import CULPRIT, End, Shape, made

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)  # three such runs are 15,000 files

SCREEN = 50
"""Lines; so many are asked of `logs`."""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("state")
    with contextlib.ExitStack() as stack:
        for end in End:
            stack.enter_context(made(folder, end, name=end.value, shape=Shape(seconds=75)))
        yield {**os.environ, "XDG_STATE_HOME": str(folder)}


def typed(env: dict[str, str], folder: Path, *arguments: str) -> str:
    argv = [sys.executable, "-m", "clusterctl", *arguments]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments", SCREENS, ids=" ".join)
def test_what_a_command_says_of_it_fits_a_screen(
    env: dict[str, str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    said = typed(env, tmp_path, *arguments)
    assert len(said.splitlines()) <= SCREEN
    assert said or "report" in arguments


@pytest.mark.parametrize("run", ["stalled", "failed"])
def test_the_rank_that_matters_stands_out_of_1600(env: dict[str, str], tmp_path: Path, run: str) -> None:
    first = typed(env, tmp_path, "why", run).splitlines()[0]
    assert f"rank {CULPRIT} on gpu138" in first
    assert f"rank {CULPRIT} on gpu138" in typed(env, tmp_path, "status", run)


def test_the_output_of_a_failed_run_ends_with_what_failed(env: dict[str, str], tmp_path: Path) -> None:
    said = typed(env, tmp_path, "logs", "failed", "-n", "20")
    assert f"gpu138 r{CULPRIT} │ RuntimeError: CUDA error: device-side assert triggered" in said


def test_a_scrape_of_1600_gpus_takes_less_than_300_ms(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", env["XDG_STATE_HOME"])
    source, seconds, text = MetricsSource(), [], ""
    for _ in range(5):
        began = time.thread_time()
        text = source.read()
        seconds.append(time.thread_time() - began)

    # Two runs go on; the one that stands still has as many GPUs.
    assert text.count("\nclusterctl_gpu_utilization_ratio{") == 3200
    assert sorted(seconds)[2] / 2 < 0.3, seconds
