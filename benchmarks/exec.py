"""A command on 32 lab nodes: `clusterctl exec -- true`, by either SSH client, against clush and pdsh."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from benchmarks.lab import lab
from benchmarks.measures import Measure, alternate, spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NODES = 32


def measure(rounds: int) -> Iterable[Measure]:
    """Yield how `exec -- true` compares with its peers."""
    with lab(NODES) as bench:
        bench.write_hosts()
        actions = {
            "ours": lambda: bench.ours("exec", "--", "true"),
            "openssh": lambda: bench.ours("exec", "--set", "ssh.client=openssh", "--", "true"),
            "clush": lambda: bench.run(["clush", "-w", bench.folded, "true"]),
            "pdsh": lambda: bench.run(["pdsh", "-R", "ssh", "-w", bench.folded, "true"]),
        }
        alternate(1, **actions)
        samples = alternate(rounds, **actions)
    for peer in ("clush", "pdsh"):
        yield _beside(peer, samples, "ours", goal=0.60)
    for peer in ("clush", "pdsh"):
        # No aim: who needs `ssh` itself has no other choice.
        yield _beside(peer, samples, "openssh", goal=None)


def _beside(peer: str, samples: Mapping[str, list[float]], who: str, *, goal: float | None) -> Measure:
    by = "" if who == "ours" else " by openssh"
    return Measure(
        name=f"exec -- true{by} on {NODES} nodes / {peer}",
        value=statistics.median(samples[who]) / statistics.median(samples[peer]),
        goal=goal,
        detail=f"{spread(samples[who])}; {peer} {spread(samples[peer])}",
    )
