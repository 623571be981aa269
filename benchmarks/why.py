"""How fast `why` answers: of 8 ranks on 4 nodes that hang, of its bundle, and of a bundle as wide as 512 ranks.

The wide one is made of what was kept of a real run (`tests/unit/why/kinds`): 64 nodes with 8 ranks, each with 40
threads, 4 children, 128 entries of the flight recorder, 128 connections and the samples of the last minutes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.lab import lab
from benchmarks.measures import Measure, timed
from tests.lab.waiting import wait_for
from tests.lab.why.play import JOB

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.lab import BenchLab

KEPT = JOB.parents[2] / "unit" / "why" / "kinds" / "sleeps-0.tar.gz"
NODES, EACH = 64, 8
THREADS, CHILDREN, ENTRIES, LINKS = 40, 4, 128, 128
LIVE_NODES, LIVE_EACH = 4, 2
PEAK = """\
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "clusterctl", *sys.argv[1:]], check=True, stdout=subprocess.PIPE)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def measure(rounds: int) -> Iterable[Measure]:
    """Yield how long it takes, and how much memory."""
    with tempfile.TemporaryDirectory(prefix="clusterctl-bench-why-") as temporary:
        folder = Path(temporary)
        yield from _live(rounds, folder)
        yield from _wide(rounds, folder)


def _live(rounds: int, folder: Path) -> Iterable[Measure]:
    with lab(LIVE_NODES) as bench:
        run = _hang(bench)
        asked = [timed(lambda: _right(bench.head.run("why", run, "--json").stdout)) for _ in range(rounds)]
        bundle = folder / "eight.tar.gz"
        bench.ours("why", run, "--save", str(bundle))
        judged = [timed(lambda: _right(_judge(bundle))) for _ in range(rounds)]
        bench.ours("down", "--kill", run)
    for name, samples, goal in (("command", asked, 5.0), ("bundle", judged, 2.0)):
        detail = f"median {median(samples):.2f} s of {rounds}; load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
        yield Measure(
            name=f"verdict of 8 ranks on 4 nodes, {name}", value=max(samples), unit="s", goal=goal, detail=detail
        )


def _hang(bench: BenchLab) -> str:
    (bench.head.folder / JOB.name).write_text(JOB.read_text())
    job = {"script": JOB.name, "args": ["sleeps", "0"], "grace": "1s"}
    limits = {"timeout": "8s", "startup_timeout": "8s"}
    bench.head.write(dict.fromkeys(bench.names, LIVE_EACH), job, name="hang", stall=limits)
    run = str(json.loads(bench.head.run("up", "-d", "--no-health", "--json", timeout=180.0).stdout)["run"])
    wait_for(lambda: bench.head.json("status", run)["state"] == "stalled", 300.0, "the run to be called stalled")
    return run


def _cpu() -> float:
    """Return the seconds that children which have ended were on a CPU."""
    times = os.times()
    return times.children_user + times.children_system


def _right(text: str) -> None:
    verdict = json.loads(text)
    assert [one["rank"] for one in verdict["culprits"]] == [0], verdict["summary"]


def _judge(bundle: Path) -> str:
    argv = [sys.executable, "-m", "clusterctl", "why", "--json", "--bundle", str(bundle)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def _wide(rounds: int, folder: Path) -> Iterable[Measure]:
    bundle = folder / "wide.tar.gz"
    files = widen(KEPT, folder / "wide")
    with tarfile.open(bundle, "w:gz") as archive:
        archive.add(files, arcname=files.name)
    before = _cpu()
    samples = [timed(lambda: _right(_judge(bundle))) for _ in range(rounds)]
    size, cpu = bundle.stat().st_size / 2**20, (_cpu() - before) / rounds
    detail = f"median {median(samples):.2f} s of {rounds}, {cpu:.2f} s of them on a CPU; {size:.0f} MiB packed"
    yield Measure(
        name=f"verdict of {NODES * EACH} ranks, bundle", value=max(samples), unit="s", goal=10.0, detail=detail
    )
    argv = [sys.executable, "-c", PEAK, "why", "--json", "--bundle", str(bundle)]
    peak = int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout) / 2**20
    yield Measure(name=f"memory for {NODES * EACH} ranks, bundle", value=peak, unit="GiB", goal=1.0)


# --- a wide run out of a small one


def widen(kept: Path, target: Path) -> Path:
    """Make the folder of a run with many ranks out of the bundle of one with four; rank 0 sleeps in both."""
    target.mkdir()
    with tarfile.open(kept) as archive:
        archive.extractall(target, filter="data")
    (run,) = target.iterdir()
    _widen_events(run / "events.jsonl")
    asleep, waits = (json.loads((run / f"stall-2/rank-{rank}.json").read_text()) for rank in (0, 1))
    journal = [json.loads(line) for line in (run / "nodes/n1/journal.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run / "nodes/n1/samples.jsonl").read_text().splitlines()]
    for node in range(NODES):
        ranks = range(node * EACH, (node + 1) * EACH)
        folder = run / f"nodes/n{node + 1}"
        folder.mkdir(exist_ok=True)
        started = [{**journal[1], "rank": rank, "local_rank": i, "seq": i + 2} for i, rank in enumerate(ranks)]
        _write(folder / "journal.jsonl", [journal[0], *started])
        _write(folder / "samples.jsonl", [_wide_sample(sample, ranks) for sample in samples * 8])
        for rank in ranks:
            told = {**(asleep if rank == 0 else waits), "rank": rank, "node": f"n{node + 1}"}
            (run / f"stall-2/rank-{rank}.json").write_text(json.dumps(_wide_rank(told)))
    return run


def _write(path: Path, lines: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _widen_events(path: Path) -> None:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    names = [f"n{node + 1}" for node in range(NODES)]
    wide: list[dict[str, Any]] = []
    for event in events:
        if event["kind"] == "attempt":
            event["world_size"] = NODES * EACH
            event["nodes"] = [
                {
                    "node": name,
                    "node_rank": i,
                    "address": f"10.0.0.{i + 1}",
                    "ranks": list(range(i * EACH, (i + 1) * EACH)),
                }
                for i, name in enumerate(names)
            ]
        if event["kind"] == "link" and event["node"] == "n1":
            wide += [{**event, "node": name} for name in names]
        elif event["kind"] != "link":
            wide.append(event)
    _write(path, [{**event, "seq": number} for number, event in enumerate(wide, 1)])


def _wide_sample(sample: dict[str, Any], ranks: range) -> dict[str, Any]:
    if sample["kind"] != "activity":
        return sample
    return {**sample, "ranks": {str(rank): next(iter(sample["ranks"].values())) for rank in ranks}}


def _wide_rank(told: dict[str, Any]) -> dict[str, Any]:
    dice = random.Random(told["rank"])
    threads = "".join(
        f"Thread 0x{dice.getrandbits(48):012x} (most recent call first):\n"
        + "".join(
            f'  File "/usr/lib/python3.11/site-packages/pkg/m{dice.randrange(99)}.py", line {i} in f{i}\n'
            for i in range(12)
        )
        + "\n"
        for _ in range(THREADS)
    )
    newest = told["recorded"][-1]
    older = [{**newest, "number": newest["number"] - ENTRIES + i, "done": True} for i in range(1, ENTRIES)]
    link = {"address": "10.0.0.1", "peer": "10.0.0.2", "state": "established", "unacked": 0, "unread": 0, "lost": 0}
    child = {"pid": 1, "name": "python", "state": "S", "wchan": "pipe_read", "cpu": 0.0, "command": "python train.py"}
    return {
        **told,
        "stacks": threads + told["stacks"],
        "recorded": [*older, newest],
        "children": [{**child, "pid": dice.randrange(1, 2**20)} for _ in range(CHILDREN)],
        "sockets": [
            {**link, "port": dice.randrange(2**16), "peer_port": dice.randrange(2**16), "awaited": False}
            for _ in range(LINKS)
        ],
        "tail": [f"step {i} loss {dice.random():.6f}" for i in range(40)],
    }
