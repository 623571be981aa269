"""How soon a job runs: from the command to the first all-reduce of the last rank, on 4 lab nodes with 2 ranks each.

`up` starts each rank anew, `forked` has a node import once.

The peers are what a person would type: a loop of ssh, one for each rank, and pdsh that starts a torchrun on each node.
All of it runs on one machine, so importing torch eight times takes most of the time for everybody.
"""

from __future__ import annotations

import functools
import shlex
import statistics
import sys
import time
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.lab import BenchLab, lab
from benchmarks.measures import Measure, spread

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

NODES, WORKERS = 4, 2
_GOALS = (
    ("up", "ssh", "bare parallel ssh", 1.05),
    ("up", "torchrun", "pdsh + torchrun", 0.85),
    ("forked", "ssh", "bare parallel ssh", 0.70),
    ("forked", "torchrun", "pdsh + torchrun", 0.50),
)
DEADLINE = 180.0
JOB = """\
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
now = time.monotonic()
assert int(total) == dist.get_world_size() == 8
path = f"/srv/shared/{sys.argv[1]}.{dist.get_rank()}"
with open(path + ".new", "w") as file:
    file.write(str(now))
os.rename(path + ".new", path)
dist.destroy_process_group()
"""


def measure(rounds: int) -> Iterable[Measure]:
    """Yield how `up` compares with a loop of ssh, and with pdsh and torchrun."""
    with lab(NODES) as bench:
        starts = _starts(bench)
        samples: dict[str, list[float]] = {name: [] for name in starts}
        tags = count()
        for kind in ("warm", *["counted"] * rounds):
            for name, start in starts.items():
                seconds = _seconds(bench, f"{name}{next(tags)}", start)
                if kind == "counted":
                    samples[name].append(seconds)
    for way, peer, words, goal in _GOALS:
        yield Measure(
            name=f"{way} to the last first all-reduce, 4x2 ranks / {words}",
            value=statistics.median(samples[way]) / statistics.median(samples[peer]),
            goal=goal,
            detail=f"{spread(samples[way])}; {peer} {spread(samples[peer])}",
        )


def _starts(bench: BenchLab) -> dict[str, Callable[[str], Sequence[subprocess.Popen[bytes]]]]:
    (bench.head.folder / "job.py").write_text(JOB)
    script = bench.lab.shared / "job.py"
    script.write_text(JOB)
    for node in bench.nodes:
        (bench.lab.shared / f"interface.{node.name}").write_text(node.interface)
    ports = count(29500)

    def up(tag: str, method: str = "spawn") -> list[subprocess.Popen[bytes]]:
        hosts = dict.fromkeys(bench.names, WORKERS)
        job = {"script": "job.py", "args": [tag], "start_method": method}
        bench.head.write(hosts, job, env={"OMP_NUM_THREADS": "1"})
        with (bench.head.folder / "said").open("w") as said:
            return [bench.start([sys.executable, "-m", "clusterctl", "up"], cwd=bench.head.folder, stderr=said)]

    def ssh(tag: str) -> list[subprocess.Popen[bytes]]:
        port = next(ports)
        return [bench.ssh_loop([(name, _by_hand(bench, rank, port, tag)) for rank, name in _ranks(bench)])]

    def torchrun(tag: str) -> list[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}", f"--nproc-per-node={WORKERS}"]
        argv += [f"--master-addr={bench.nodes[0].address}", f"--master-port={next(ports)}"]
        command = f"OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=$(cat /srv/shared/interface.%h) {shlex.join(argv)}"
        command += f" --node-rank=%n /srv/shared/job.py {tag}"
        return [bench.start(["pdsh", "-R", "ssh", "-w", bench.folded, command])]

    return {"up": up, "forked": functools.partial(up, method="fork"), "ssh": ssh, "torchrun": torchrun}


def _ranks(bench: BenchLab) -> Iterable[tuple[int, str]]:
    return enumerate(name for name in bench.names for _ in range(WORKERS))


def _by_hand(bench: BenchLab, rank: int, port: int, tag: str) -> str:
    node = bench.nodes[rank // WORKERS]
    env = {
        "RANK": rank,
        "LOCAL_RANK": rank % WORKERS,
        "WORLD_SIZE": NODES * WORKERS,
        "MASTER_ADDR": bench.nodes[0].address,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "GLOO_SOCKET_IFNAME": node.interface,
    }
    return shlex.join(["env", *(f"{k}={v}" for k, v in env.items()), sys.executable, "/srv/shared/job.py", tag])


def _seconds(bench: BenchLab, tag: str, start: Callable[[str], Sequence[subprocess.Popen[bytes]]]) -> float:
    began = time.monotonic()
    started = start(tag)
    marks = [bench.lab.shared / f"{tag}.{rank}" for rank in range(NODES * WORKERS)]
    try:
        _wait(marks, started, began + DEADLINE)
    except RuntimeError as error:
        raise RuntimeError(f"{tag}: {error}; clusterctl said: {(bench.head.folder / 'said').read_text()}") from error
    for process in started:
        process.wait(timeout=DEADLINE)
    return max(float(mark.read_text()) for mark in marks) - began


def _wait(marks: Sequence[Path], started: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    while not all(mark.exists() for mark in marks):
        failed = any(process.poll() not in (None, 0) for process in started)
        if failed or time.monotonic() > deadline:
            raise RuntimeError(f"no first all-reduce: {[mark.name for mark in marks if not mark.exists()]}")
        time.sleep(0.1)
