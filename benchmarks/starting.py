"""How soon the program is there: `clusterctl --help` against importing click."""

from __future__ import annotations

import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.measures import Measure, alternate, spread

if TYPE_CHECKING:
    from collections.abc import Iterable


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the ratio of `clusterctl --help` to `python -c 'import click'`."""
    samples = alternate(
        rounds * 2,
        ours=lambda: _run("-m", "clusterctl", "--help"),
        peer=lambda: _run("-c", "import click"),
    )
    ratio = statistics.median(samples["ours"]) / statistics.median(samples["peer"])
    detail = f"{spread(samples['ours'])}; click {spread(samples['peer'])}"
    yield Measure(name="clusterctl --help / import click", value=ratio, goal=3, detail=detail)


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
