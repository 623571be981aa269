"""A run that fails again and again: how long from the end of all old ranks to the start of all new ones."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lab import BenchLab, lab
from benchmarks.measures import Measure, percentile, spread

if TYPE_CHECKING:
    from collections.abc import Iterable

NODES = 4
RANKS = 2
# A word of its own for each attempt: attempts that end alike are not repeated for ever.
FAIL = """\
import os, time
if os.environ["RANK"] == "3":
    raise SystemExit("failed in " + "x" * int(os.environ["CLUSTERCTL_ATTEMPT"]))
time.sleep(600)
"""


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the time from old ranks gone to new ranks executed, on 4 nodes of 2 ranks with `backoff: 0`."""
    restarts = max(2, 4 * rounds)
    with lab(NODES) as bench:
        (bench.head.folder / "fail.py").write_text(FAIL)
        bench.head.write(
            dict.fromkeys(bench.names, RANKS),
            {"script": "fail.py", "grace": "2s"},
            restart={"max_restarts": restarts, "backoff": 0},
        )
        bench.head.run("up", "--no-health", timeout=600.0)
        pauses, ends = _pauses(bench)
    yield Measure(
        name="old ranks gone to new ranks executed, p95",
        value=percentile(pauses, 0.95),
        unit="s",
        goal=3,
        detail=spread(pauses),
    )
    yield Measure(
        name="first exit to the last of 8 ranks gone, p95",
        value=percentile(ends, 0.95),
        unit="s",
        goal=2,
        detail=f"{spread(ends)}; median {statistics.median(ends):.2f} s",
    )


def _pauses(bench: BenchLab) -> tuple[list[float], list[float]]:
    """Return, by attempt, the seconds between two attempts and those from its first exit to its end everywhere."""
    run = bench.head.json("ps", "-a")[-1]["run"]
    nodes = Path(bench.env["XDG_STATE_HOME"]) / "clusterctl" / "runs" / run / "nodes"
    events: list[dict[str, Any]] = []
    for name in bench.names:
        events += [json.loads(line) for line in (nodes / name / "journal.jsonl").read_text().splitlines()]
    attempts = max(event.get("attempt", 0) for event in events)

    def times(kind: str, attempt: int) -> list[float]:
        return [e["wall"] for e in events if e["kind"] == kind and e["attempt"] == attempt]

    # The nodes of a lab share one clock.
    pauses = [max(times("started", n)) - max(times("swept", n - 1)) for n in range(1, attempts + 1)]
    ends = [max(times("swept", n)) - min(times("exited", n)) for n in range(attempts + 1)]
    return pauses, ends
