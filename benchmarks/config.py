"""Checking a cluster file of 200 hosts: `clusterctl config -q` against importing what reads it."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measures import Measure, alternate, spread

if TYPE_CHECKING:
    from collections.abc import Iterable

HOSTS = 200


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the ratio of `config -q` to `python -c 'import yaml, pydantic'`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").touch()
        path = Path(folder) / "cluster.yaml"
        path.write_text(document())
        samples = alternate(
            rounds * 2,
            ours=lambda: _run("-m", "clusterctl", "config", "-q", str(path)),
            peer=lambda: _run("-c", "import yaml, pydantic"),
        )
    yield Measure(
        name=f"config -q of {HOSTS} hosts / import yaml, pydantic",
        value=statistics.median(samples["ours"]) / statistics.median(samples["peer"]),
        goal=4,
        detail=f"{spread(samples['ours'])}; import {spread(samples['peer'])}",
    )


def document() -> str:
    """Return a cluster file in which every host stands by itself, with keys of its own."""
    hosts = "".join(
        f"  - host: gpu{number:03}\n    gpus: 8\n    internal_ip: 10.0.{number // 100}.{number % 100 + 1}\n"
        f"    env: {{SITE: site-{number % 7}}}\n"
        for number in range(HOSTS)
    )
    return f"version: 1\nname: large\nhosts:\n{hosts}job:\n  script: train.py\n"


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
