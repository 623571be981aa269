"""How soon a stall is noticed, how fast its evidence is there, and what looking costs a training loop.

The goals are those of the default settings. Freezes are timed on a lab of two nodes, several step times side by side;
evidence and cost on workers of this machine, blocks of steps with the shim and without it turn by turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lab import lab
from benchmarks.measures import Measure
from clusterctl.agent.watch import evidence_collector
from clusterctl.agent.watch.activity_sampler import ActivitySampler
from tests.agent.stalls.conftest import Bench, Worker
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.lab import BenchLab

STEP_SECONDS = (0.01, 0.1, 0.5, 1.0, 2.0)
RANKS = 8
SAMPLE_SECONDS = 2.0

FREEZES = """\
import sys, time
import clusterctl
period, end = float(sys.argv[1]), time.monotonic() + 25.0
step = 0
while time.monotonic() < end:
    time.sleep(period)
    step += 1
    clusterctl.progress(step=step)
print("frozen", time.time())
time.sleep(1000)
"""
WAITS = "import time\nprint('up')\ndef waits():\n    time.sleep(1000)\nwaits()\n"
# About 10 ms a step on one core: long enough to be a step, short enough that what is added to it is seen. Blocks of
# steps as they are alternate with blocks without our hook and our thread: a busy moment of the machine meets both.
LOOP = """\
import json, statistics, sys, time
import torch, torch.distributed as dist
import _clusterctl_shim
torch.manual_seed(0)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
data = torch.randn(128, 512)


def block():
    seconds = []
    for _ in range(20):
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def bare_block():
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    ours = dict(hooks)
    assert ours
    hooks.clear()
    _clusterctl_shim.active_shim.writer.pause()
    seconds = block()
    _clusterctl_shim.active_shim.writer.resume()
    hooks.update(ours)
    return seconds


block()
if sys.argv[1:] == ["compare"]:
    pairs = []
    for number in range(40):
        # Each kind goes first as often as the other.
        if number % 2:
            pairs.append((bare_block(), block()))
        else:
            pairs.append((block(), bare_block())[::-1])
    print("measured", json.dumps(pairs))
else:
    for _ in range(40):
        block()
    (hook,) = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks.values()
    begun = time.process_time()
    for _ in range(100_000):
        hook(optimizer, (), {})
    print("measured", (time.process_time() - begun) / 100_000)
"""


def measure(rounds: int) -> Iterable[Measure]:
    """Yield how soon, how fast, how cheap."""
    yield from _noticed(max(1, rounds // 5))
    yield from _gathered(rounds)
    yield from _cost(rounds)


# --- noticed


def _noticed(rounds: int) -> Iterable[Measure]:
    seen: dict[str, list[float]] = {"suspected": [], "confirmed": []}
    with lab(2) as bench:
        for _ in range(rounds):
            with ThreadPoolExecutor(len(STEP_SECONDS)) as pool:
                for found in pool.map(lambda period: _freeze(bench, period), STEP_SECONDS):
                    for phase, seconds in found.items():
                        seen[phase].append(seconds)
    steps = ", ".join(f"{period:g}" for period in STEP_SECONDS)
    for phase, goal in (("suspected", 35.0), ("confirmed", 60.0)):
        detail = f"longest of {len(seen[phase])}, median {statistics.median(seen[phase]):.1f} s; steps of {steps} s"
        yield Measure(name=f"freeze until {phase}", value=max(seen[phase]), unit="s", goal=goal, detail=detail)


def _freeze(bench: BenchLab, period: float) -> dict[str, float]:
    """Return the seconds from the freeze of a run to each word of the rule."""
    name = f"freeze-{period:g}".replace(".", "-")
    head = Head(Path(tempfile.mkdtemp(dir=bench.head.folder)), bench.env)
    (head.folder / "job.py").write_text(FREEZES)
    job = {"script": "job.py", "args": [str(period)], "grace": "1s"}
    head.write(dict.fromkeys(bench.names, 1), job, name=name)
    run = str(json.loads(head.run("up", "-d", "--no-health", "--json").stdout)["run"])
    folder = Path(bench.env["XDG_STATE_HOME"]) / "clusterctl" / "runs" / run

    def stalls() -> dict[str, float] | None:
        lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        found = {line["phase"]: float(line["time"]) for line in lines if line["kind"] == "stall"}
        return found if "confirmed" in found else None

    found = wait_for(stalls, 150.0, f"{run} to be called stalled", every=0.5)
    logs = [path.read_text() for path in folder.glob("nodes/*/attempt-0/rank-*.log")]
    frozen = max(float(text.split("frozen ")[1].split()[0]) for text in logs)
    head.run("down", run)
    return {phase: found[phase] - frozen for phase in ("suspected", "confirmed")}


# --- gathered


def _gathered(rounds: int) -> Iterable[Measure]:
    whole: list[float] = []
    stopped: list[float] = []
    with _Workers() as workers:
        ranks = [workers.start(WAITS, rank=rank) for rank in range(RANKS)]
        for worker in ranks:
            worker.armed()
        whole += [_collect(workers, ranks) for _ in range(rounds)]
        os.kill(ranks[3].pid, signal.SIGSTOP)
        stopped += [_collect(workers, ranks) for _ in range(rounds)]
    for name, samples, goal in ((f"evidence of {RANKS} ranks", whole, 2.0), ("the same, one stopped", stopped, 4.0)):
        detail = f"longest of {rounds}, median {statistics.median(samples):.2f} s"
        yield Measure(name=name, value=max(samples), unit="s", goal=goal, detail=detail)


def _collect(workers: _Workers, ranks: list[Worker]) -> float:
    deadline = time.monotonic() + 4.0
    facts = [worker.facts for worker in ranks]
    found = evidence_collector.collect_evidence(
        facts, str(workers.status_dir), str(workers.tmp_path / "stall-1"), deadline
    )
    return float(found["took_s"])


# --- cost


def _cost(rounds: int) -> Iterable[Measure]:
    pairs = [pair for _ in range(rounds) for pair in _compare()]
    parts = [_parts() for _ in range(max(1, rounds // 2))]
    share, hook = (statistics.median(found) * 100 for found in zip(*parts, strict=True))
    ratios = [(ours / bare - 1) * 100 for bare, ours in pairs]
    more = statistics.median(ratios)
    # Of a median, where samples spread normally.
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
    bare = statistics.median(bare for bare, _ in pairs) * 1000
    # What is done once a second or less hits few steps: it is counted as if the loop had to wait for all of it.
    detail = f"{more:+.2f} % (±{error:.2f}) of a step of {bare:.2f} ms, {len(pairs)} pairs; and {share:.2f} % beside it"
    name = "shim and sampling, part of a 10 ms step"
    yield Measure(name=name, value=more + share, unit="%", goal=1.0, detail=detail)
    detail = f"the hook's {hook * 1e4:.2f} us of processor time, and {share:.2f} % beside it"
    yield Measure(name="the same, its parts added up", value=hook / 0.01 + share, unit="%", goal=1.0, detail=detail)
    detail = "processor time of the shim's thread and of the sampling"
    yield Measure(name="shim and sampling, part of a core per rank", value=share, unit="%", goal=0.5, detail=detail)


def _compare() -> list[tuple[float, float]]:
    """Return the seconds of a step without the shim and with it, in pairs of blocks that followed each other."""
    with _Workers() as workers:
        ranks = _loop(workers, "compare")
        _sample_until_done(workers, ranks)
        for worker in ranks:
            if worker.process.wait(120.0) != 0:
                raise RuntimeError(f"the loop failed: {worker.text}")
        return [pair for worker in ranks for pair in json.loads(worker.text.partition("measured ")[2])]


def _parts() -> tuple[float, float]:
    """Return what sampling and the shim's thread take of a core, per rank, and the seconds of a step's hook."""
    with _Workers() as workers:
        ranks = _loop(workers)
        share = _sample_until_done(workers, ranks)
        for worker in ranks:
            worker.process.wait(120.0)
        return share, float(ranks[0].text.partition("measured ")[2])


def _loop(workers: _Workers, *arguments: str) -> list[Worker]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    script = workers.tmp_path / "loop.py"
    script.write_text(LOOP)
    argv = [sys.executable, str(script), *arguments]
    return [workers.start(rank=rank, argv=argv, env={**env, "RANK": str(rank)}) for rank in range(2)]


def _sample_until_done(workers: _Workers, ranks: list[Worker]) -> float:
    """Sample as a supervisor does; return the share of a core that it and the shim's thread took, per rank."""
    sampler = ActivitySampler([worker.id for worker in ranks], str(workers.status_dir))
    begun, ours, theirs = time.monotonic(), time.process_time(), 0.0
    while all(worker.process.poll() is None for worker in ranks):
        sampler.sample()
        theirs = sum(_thread_seconds(worker) for worker in ranks) or theirs
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks[0].process.wait(SAMPLE_SECONDS)
    return (time.process_time() - ours + theirs) / (time.monotonic() - begun) / len(ranks)


def _thread_seconds(worker: Worker) -> float:
    """Processor time that the shim's thread of a worker has used so far."""
    said = worker.said()
    try:
        text = Path(f"/proc/{worker.pid}/task/{said['tid'] if said else 0}/schedstat").read_text()
    except OSError:
        return 0.0
    return int(text.split()[0]) / 1e9


class _Workers(Bench):
    """Workers with the shim put in as the supervisor does it, ended with the block."""

    def __init__(self) -> None:
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        super().__init__(Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp(dir=root)))

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for folder in (self.tmp_path, self.status_dir):
            shutil.rmtree(folder, ignore_errors=True)
