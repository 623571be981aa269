"""A command on 32 lab nodes: `clusterctl exec -- true` against clush and pdsh."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from benchmarks.lab import lab
from benchmarks.measures import Measure, alternate, spread

if TYPE_CHECKING:
    from collections.abc import Iterable

NODES = 32


def measure(rounds: int) -> Iterable[Measure]:
    """Yield how `exec -- true` compares with its peers."""
    with lab(NODES) as bench:
        bench.write_hosts()
        actions = {
            "ours": lambda: bench.ours("exec", "--", "true"),
            "clush": lambda: bench.run(["clush", "-w", bench.folded, "true"]),
            "pdsh": lambda: bench.run(["pdsh", "-R", "ssh", "-w", bench.folded, "true"]),
        }
        alternate(1, **actions)
        samples = alternate(rounds, **actions)
    for peer in ("clush", "pdsh"):
        yield Measure(
            name=f"exec -- true on {NODES} nodes / {peer}",
            value=statistics.median(samples["ours"]) / statistics.median(samples[peer]),
            goal=1,
            detail=f"{spread(samples['ours'])}; {peer} {spread(samples[peer])}",
        )
