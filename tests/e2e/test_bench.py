"""A scaling report of the built-in model and of a job, on local nodes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.documented import REPOSITORY, typed
from tests.lab.lab import Lab

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import LocalHead

JOB = """\
import os, time
import clusterctl
for step in range(30):
    time.sleep(0.2 / int(os.environ["WORLD_SIZE"]))
    clusterctl.progress(step=step)
"""


@pytest.mark.torch
def test_the_built_in_model_tells_where_an_epoch_goes_with_every_mode(head: LocalHead) -> None:
    head.write_local({"script": "missing.py"}, (1, 1))
    (head.folder / "missing.py").write_text("raise SystemExit('not this one')\n")
    plot = head.folder / "scaling.png"

    done = head.run(*typed("clusterctl bench --model --plot scaling.png"), "--json", "--epochs", "1", "--", "--samples", "256", "--batch", "64", timeout=100)  # fmt: skip

    assert done.returncode == 0, done.stderr
    rows = {(row["mode"], row["workers"]): row for row in json.loads(done.stdout)}
    assert list(rows) == [("single", 1), ("dp", 1), ("ddp", 1), ("ddp", 2)]
    assert rows["single", 1]["speedup"] == rows["single", 1]["efficiency"] == 1.0
    two = rows["ddp", 2]
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2, abs=1e-3)
    assert all(two[part] > 0 for part in ("epoch_s", "data", "compute", "comm", "wait"))
    assert rows["single", 1]["comm"] == rows["single", 1]["wait"] == 0
    assert rows["dp", 1]["comm"] is None
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_job_is_timed_from_outside_and_a_failing_one_ends_the_report(head: LocalHead) -> None:
    head.write_local({"script": "work.py"}, (1, 1))
    (head.folder / "work.py").write_text(JOB)

    done = head.run(*typed("clusterctl bench"), "--json")
    head.write_local({"command": "exit 3"})
    failed = head.run("bench", "--no-health")

    one, two = json.loads(done.stdout)
    assert one["epoch_s"] == pytest.approx(6.0, abs=1.5)
    assert two["speedup"] > 1.3
    assert (one["mode"], one["data"]) == ("job", None)
    assert failed.returncode == 100
    assert "the report was not finished" in failed.stderr


def test_a_file_that_says_nothing_of_gpus_has_the_nodes_asked(head: LocalHead) -> None:
    path = head.write_local({"command": "exit 3"})
    path.write_text(path.read_text().replace("  gpus: 0\n", "").replace("- gpus: 0\n  ", "- "))
    assert "gpus" not in path.read_text()

    done = head.run("bench", "--no-health", "--workers", "1")

    assert done.returncode == 100
    assert "the report was not finished" in done.stderr


def test_a_job_gets_the_arguments_and_the_report_a_picture(head: LocalHead) -> None:
    head.write_local({"script": "work.py"}, (1, 1), env={"OMP_NUM_THREADS": "1"})
    (head.folder / "work.py").write_text("import sys\nprint(*sys.argv[1:])\n")

    asked = head.run(*typed("clusterctl bench --workers 1,2 --epochs 3 -- --data /scratch/imagenet"))
    drawn = head.run(*typed("clusterctl bench --plot scaling.png"))

    assert asked.returncode == drawn.returncode == 0, asked.stderr + drawn.stderr
    runs = [run["run"] for run in head.json("ps", "-a")]
    said = [head.run("logs", run, "--all", "-o", "raw").stdout.split() for run in runs]
    assert sorted(map(len, said)) == [0, 0, 2, 4]
    assert {*said[0], *said[1], *said[2], *said[3]} == {"--data", "/scratch/imagenet"}
    assert (head.folder / "scaling.png").read_bytes().startswith(b"\x89PNG")


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
