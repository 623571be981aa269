"""How soon a failure is known, nothing is left of it, and the next attempt runs: four nodes, eight ranks.

One run of many attempts: in each of them one rank ends badly, and in every second one the others do not heed SIGTERM.
All nodes of the lab are one machine, so the times of all processes are times of one clock.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks.lab import lab
from benchmarks.measures import Measure, percentile, spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

GRACE = 1.0
RANKS = 8
SHARED = "/srv/shared"
SCRIPT = f"""\
import os, signal, time
began = time.monotonic()
attempt, rank = int(os.environ["CLUSTERCTL_ATTEMPT"]), int(os.environ["RANK"])
if attempt % 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("{SHARED}/began.%d.%d.new" % (attempt, rank), "w") as file:
    file.write(str(began))
os.rename(file.name, file.name[:-4])
if rank == 5:
    while not all(os.path.exists("{SHARED}/began.%d.%d" % (attempt, r)) for r in range({RANKS})):
        time.sleep(0.02)
    time.sleep(0.3)
    with open("{SHARED}/failed.%d" % attempt, "w") as file:
        file.write("%.6f %.6f" % (time.monotonic(), time.time()))
    os._exit(1 + attempt % 100)
time.sleep(600)
"""


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the 95th percentiles of four samples a round."""
    attempts = 8 * rounds
    with lab(4) as bench:
        (bench.head.folder / "fail.py").write_text(SCRIPT)
        job = {"script": "fail.py", "grace": f"{GRACE:g}s"}
        restart = {"max_restarts": attempts - 1, "backoff": 0}
        bench.head.write(dict.fromkeys(bench.names, 2), job, restart=restart)
        done = bench.head.run("up", "--no-health", timeout=60.0 + 10 * attempts)
        run = bench.head.newest()
        if done.returncode != 100:
            raise RuntimeError(f"the run ended with {done.returncode}: {done.stderr}")
        folder = _folder(bench.env["XDG_STATE_HOME"], run)
        yield from _measures(folder, bench.lab.shared, attempts)


def _folder(state: str, run: str) -> Path:
    from pathlib import Path

    return Path(state) / "clusterctl" / "runs" / run


def _measures(folder: Path, shared: Path, attempts: int) -> Iterator[Measure]:
    decided = {e["attempt"]: e["time"] for e in _lines(folder / "events.jsonl") if e["kind"] == "decided"}
    ends: dict[int, list[float]] = {}
    for journal in folder.glob("nodes/*/journal.jsonl"):
        for event in _lines(journal):
            if event["kind"] == "exited":
                ends.setdefault(event["attempt"], []).append(event["latest"])
    failed = {a: [float(t) for t in (shared / f"failed.{a}").read_text().split()] for a in range(attempts)}
    known = [decided[a] - failed[a][1] for a in range(attempts)]
    gone = [max(ends[a]) - failed[a][0] for a in range(attempts)]
    begun = [max(_began(shared, a)) - max(ends[a - 1]) for a in range(1, attempts)]
    yield _p95("a worker's exit is known to the controller", known, 1.0)
    yield _p95("the last worker is gone, SIGTERM heeded", gone[::2], 2.0)
    yield _p95(f"the last worker is gone, SIGTERM not heeded, grace {GRACE:g} s", gone[1::2], GRACE + 1.0)
    yield _p95("old ranks gone to all new ranks at work, `backoff: 0`", begun, 3.0)


def _p95(name: str, samples: list[float], goal: float) -> Measure:
    return Measure(name=f"p95: {name}", value=percentile(samples, 0.95), unit="s", goal=goal, detail=spread(samples))


def _began(shared: Path, attempt: int) -> list[float]:
    return [float((shared / f"began.{attempt}.{rank}").read_text()) for rank in range(RANKS)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
