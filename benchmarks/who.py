"""`clusterctl who` on 32 lab nodes: the wall clock, and the head's CPU time for each node beyond the first."""

from __future__ import annotations

import contextlib
import io
import resource
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.lab import BenchLab, lab
from benchmarks.measures import Measure, alternate, spread

if TYPE_CHECKING:
    from collections.abc import Iterable

NODES = 32


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the time of one look at all nodes, and what each node costs the head."""
    with lab(NODES) as bench:
        bench.write_hosts()
        actions = {"who": lambda: bench.ours("who"), "exec": lambda: bench.ours("exec", "--", "true")}
        alternate(1, **actions)  # the first one brings the agent there
        wall = alternate(rounds, **actions)
        cpu = [(_cpu_s(bench) - _cpu_s(bench, "--nodes", bench.names[0])) / (NODES - 1) for _ in range(rounds)]
    who, other = wall["who"], wall["exec"]
    yield Measure(name=f"who on {NODES} nodes", value=statistics.median(who), unit="s", goal=2, detail=spread(who))
    yield Measure(
        name=f"who / exec -- true on {NODES} nodes",
        value=statistics.median(who) / statistics.median(other),
        detail=f"{spread(who)} against {spread(other)}",
    )
    yield Measure(
        name=f"who: head's CPU per node ({NODES} nodes), without `ssh -G`",
        value=1000 * statistics.median(cpu),
        unit="ms",
        goal=10,
        detail=spread(cpu),
    )


def _cpu_s(bench: BenchLab, *options: str) -> float:
    argv = [sys.executable, "-m", "benchmarks.who", "who", str(bench.head.folder / "cluster.yaml"), *options]
    done = subprocess.run(argv, env=dict(bench.env), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=True)
    return float(done.stdout)


def _run_and_print_cpu_time() -> None:
    """Run the command of this process's arguments, and print the CPU seconds of this process alone."""
    from clusterctl.cli.main import run

    with contextlib.redirect_stdout(io.StringIO()):
        if run() != 0:
            raise SystemExit(1)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime)


if __name__ == "__main__":
    _run_and_print_cpu_time()
