"""`attach` to a run with 1 GB of output that is still on its way: how soon its last lines are on the screen."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.lab import BenchLab, lab
from benchmarks.measures import Measure, percentile, spread

if TYPE_CHECKING:
    from collections.abc import Iterable

SIZE = 1_000_000_000
DEADLINE = 120.0
LAST = b"the last line that was written"
FLOOD = f"""\
import os, time

block = b"".join(b"step %07d loss 0.%06d lr 0.000300 tokens/s 123456.7\\n" % (i, i) for i in range(20_000))
left = {SIZE}
while left > 0:
    left -= os.write(1, block)
os.write(1, b"{LAST.decode()}\\n")
open("/srv/shared/written", "w").close()
time.sleep(3600)
"""


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the time from typing `attach` to the last of the lines, at the worst and in the middle."""
    with lab(1) as bench:
        (bench.head.folder / "flood.py").write_text(FLOOD)
        bench.head.write({bench.names[0]: 1}, {"script": "flood.py", "grace": "1s"})
        # A line of 100 Mbit a second: the whole would take 80 s to arrive.
        node = bench.nodes[0]
        limit = ["rate", "100mbit", "burst", "256k", "latency", "50ms"]
        node.run(["tc", "qdisc", "add", "dev", node.interface, "root", "tbf", *limit], check=True)
        run = bench.head.json("up", "-d", "--no-health", timeout=DEADLINE)["run"]
        written = bench.lab.shared / "written"
        node.wait_for(written.exists, deadline=DEADLINE, what="a gigabyte of output")
        began = time.monotonic()
        delays: list[float] = []
        bare: list[float] = []
        while len(delays) < max(2, rounds * 2) and time.monotonic() - began < 60:
            delays.append(_until_last(bench, run))
            bare.append(_program(bench))
        bench.ours("down", run, "--kill")
    yield Measure(
        name="attach to 1 GB on its way, last line shown, p95",
        value=percentile(delays, 0.95),
        unit="s",
        goal=1,
        detail=f"{spread(delays)}; `clusterctl ps` alone {spread(bare)}; median {statistics.median(delays):.2f} s",
    )


def _until_last(bench: BenchLab, run: str) -> float:
    """Return the seconds from the start of `attach` to the last line."""
    started = time.monotonic()
    view = subprocess.Popen(
        [sys.executable, "-m", "clusterctl", "attach", run],
        cwd=bench.head.folder,
        env=dict(bench.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert view.stdout is not None
    shown = b""
    try:
        while LAST not in shown:
            data = os.read(view.stdout.fileno(), 1 << 16)
            if not data or time.monotonic() - started > DEADLINE:
                raise RuntimeError(f"attach did not show the last line, but {shown[-200:]!r}")
            shown += data
        return time.monotonic() - started
    finally:
        view.kill()
        view.wait()
        view.stdout.close()


def _program(bench: BenchLab) -> float:
    started = time.monotonic()
    bench.ours("ps")
    return time.monotonic() - started
