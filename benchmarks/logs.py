"""Output on its way home: how fast 200 MB are replicated, and how soon a printed line is on the screen."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.lab import BenchLab, lab
from benchmarks.measures import Measure, percentile, spread, timed

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SIZE = 200_000_000
PRINTS = 40
DEADLINE = 120.0
FLOOD = """\
import os, time

data = open("/srv/shared/flood", "rb").read()
while not os.path.exists("/srv/shared/go"):
    time.sleep(0.01)
began = time.monotonic()
view = memoryview(data)
while view:
    view = view[os.write(1, view[: 1 << 20]):]
open("/srv/shared/began", "w").write(str(began))
while os.path.exists("/srv/shared/go"):
    time.sleep(0.1)
"""
PRINT = f"""\
import random, time

random.seed(1)
for number in range({PRINTS}):
    time.sleep(random.uniform(0.05, 0.25))
    print(f"stamp {{time.monotonic()}}")
"""


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the speed of replication against `ssh node cat`, and the delay of a line."""
    with lab(1) as bench:
        (bench.lab.shared / "flood").write_bytes(_lines())
        (bench.head.folder / "flood.py").write_text(FLOOD)
        (bench.head.folder / "print.py").write_text(PRINT)
        ours, peer = [], []
        for _ in range(rounds):
            ours.append(_replicated(bench))
            peer.append(timed(lambda: _cat(bench)))
        delays = [delay for _ in range(max(1, rounds // 2)) for delay in _delays(bench)]
    speed = SIZE / 1e6 / statistics.median(ours)
    yield Measure(
        name="replication of 200 MB of output / ssh node cat",
        value=statistics.median(peer) / statistics.median(ours),
        goal=0.5,
        at_least=True,
        detail=f"{speed:.0f} MB/s; {spread(ours)}; cat {spread(peer)}",
    )
    yield Measure(
        name="print in a worker to line on the screen, median",
        value=1000 * statistics.median(delays),
        unit="ms",
        goal=250,
        detail=f"p95 {1000 * percentile(delays, 0.95):.0f} ms, n={len(delays)}",
    )


def _lines() -> bytes:
    block = b"".join(
        b"step %07d loss 0.%06d lr 0.000300 tokens/s 123456.7 | an epoch's line\n" % (i, i) for i in range(9999)
    )
    return (block * (SIZE // len(block) + 1))[:SIZE]


def _replicated(bench: BenchLab) -> float:
    """Return the seconds from the worker's first byte to the head's last."""
    shared = bench.lab.shared
    bench.head.write({bench.names[0]: 1}, {"script": "flood.py", "grace": "1s"}, sync={"max_size": "1GB"})
    run = json.loads(bench.ours("up", "-d", "--no-health", "--json").stdout)["run"]
    (replica,) = _outputs(bench, run)
    (shared / "go").touch()
    deadline = time.monotonic() + DEADLINE
    while not replica.exists() or replica.stat().st_size < SIZE:
        if time.monotonic() > deadline:
            raise TimeoutError("the output was not replicated")
        time.sleep(0.005)
    ended = time.monotonic()
    began = float((shared / "began").read_text())
    (shared / "go").unlink()
    bench.ours("wait", run)
    return ended - began


def _outputs(bench: BenchLab, run: str) -> list[Path]:
    from pathlib import Path as Folder

    from clusterctl.agent.protocol.run_files import format_output_path

    runs = Folder(bench.env["XDG_STATE_HOME"]) / "clusterctl" / "runs" / run / "nodes"
    return [runs / bench.names[0] / format_output_path(0, 0)]


def _cat(bench: BenchLab) -> None:
    with (bench.head.folder / "copy").open("wb") as copy:
        subprocess.run(["ssh", bench.names[0], "cat /srv/shared/flood"], env=dict(bench.env), stdout=copy, check=True)
    (bench.head.folder / "copy").unlink()


def _delays(bench: BenchLab) -> list[float]:
    bench.head.write({bench.names[0]: 1}, {"script": "print.py", "grace": "1s"})
    argv = [sys.executable, "-m", "clusterctl", "up", "--no-health"]
    shown = bench.start(argv, cwd=bench.head.folder, stdout=subprocess.PIPE)
    assert shown.stdout is not None
    delays = []
    for line in shown.stdout:
        seen = time.monotonic()
        if b"stamp " in line:
            delays.append(seen - float(line.rpartition(b" ")[2]))
    if shown.wait() != 0 or len(delays) != PRINTS:
        raise RuntimeError("not every line came")
    return delays
