"""The first step of a job that calls `torch.compile`: with an empty cache, and with one that another run has filled.

The compiler is TorchInductor for CPUs, which needs a C++ compiler. The step is the first of a transformer of four
layers, forward and backward, and its time does not contain the import of torch.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measures import Measure, spread

if TYPE_CHECKING:
    from collections.abc import Iterable

_CLUSTER = """\
version: 1
name: compile
hosts: [{host: localhost, transport: local, gpus: 0, python: PYTHON}]
job: {script: train.py, cache: node}
"""
_SCRIPT = """\
import time, torch
layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
model = torch.compile(torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
batch = torch.randn(4, 32, 128)
began = time.perf_counter()
model(batch).sum().backward()
print(f"first step: {time.perf_counter() - began:.2f} s")
"""


def measure(rounds: int) -> Iterable[Measure]:
    """Yield how many times longer the first step takes without the kept cache."""
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            (folder / "cluster.yaml").write_text(_CLUSTER.replace("PYTHON", sys.executable))
            (folder / "train.py").write_text(_SCRIPT)
            cold.append(_measure_first_step(folder))
            warm.append(_measure_first_step(folder))
    yield Measure(
        name="the first step, cold / with the kept cache",
        value=statistics.median(cold) / statistics.median(warm),
        detail=f"{spread(cold)} against {spread(warm)}",
    )


def _measure_first_step(folder: Path) -> float:
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "clusterctl", "up"], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    found = re.search(r"first step: ([\d.]+) s", done.stdout)
    if found is None:
        raise RuntimeError(f"clusterctl up: exit code {done.returncode}: {done.stdout}{done.stderr}")
    return float(found[1])
