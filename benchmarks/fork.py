"""What forking saves: 4 ranks of one node that import Keras and torch, forked, started anew, and under torchrun.

Without health checks, since torchrun has none. A restart is timed from the moment at which a rank ends itself to the
first all-reduce of the last rank of the next attempt.

Wall time depends on what else the machine does, and not for all alike: imports for all ranks are one process among the
others, ranks that import for themselves are four. So CPU is measured, too, where the kernel counts it for a group.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from benchmarks.measures import Measure, spread
from tests.lab.head_cli import Head

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RANKS = 4
JOB = """\
import os, sys, time
import torch
import torch.distributed as dist
import keras

folder, crash = sys.argv[1], sys.argv[2] == "crash"
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
now = time.monotonic()
assert int(total) == dist.get_world_size() == 4 and keras.backend.backend() == "torch"
with open("/proc/self/smaps_rollup") as file:
    shares = [line.split()[1] for line in file if line.startswith("Pss:")]
with open(f"{folder}/{attempt}.{dist.get_rank()}", "w") as file:
    file.write(f"{now} {shares[0]}")
dist.barrier()
if crash and attempt == 0:
    if dist.get_rank() == 1:
        with open(f"{folder}/crash", "w") as file:
            file.write(str(time.monotonic()))
        os._exit(1)
    time.sleep(600)
dist.destroy_process_group()
"""
WAYS = ("fork", "spawn", "torchrun")
_COUNTED = Path("/sys/fs/cgroup/cpuacct")
"""Where a group of processes has its CPU counted; version 1 of the kernel's interface, which needs no preparation."""


@contextlib.contextmanager
def _cpu(seconds: list[float]) -> Iterator[None]:
    """Append the CPU time that this process and all that it starts takes meanwhile, if it can be had."""
    place = _COUNTED / f"clusterctl-bench-{os.getpid()}-{time.monotonic_ns()}"
    try:
        place.mkdir()
    except OSError:
        yield
        return
    (place / "cgroup.procs").write_text("0")
    try:
        yield
        seconds.append(int((place / "cpuacct.usage").read_text()) / 1e9)
    finally:
        for pid in (place / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (_COUNTED / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            # Somebody is still on the way out.
            place.rmdir()


class Bench:
    """Starts the job in each way, in folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._tags = folder, count()
        (folder / "project").mkdir()
        (folder / "project/job.py").write_text(JOB)
        self.env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "KERAS_BACKEND": "torch"}
        self._head = Head(folder / "project", self.env)

    def run(self, way: str, *, crash: bool) -> tuple[Path, float]:
        """Run it to its end; return the folder of what it wrote, and its time."""
        told = self.folder / f"told-{next(self._tags)}"
        told.mkdir()
        arguments = [str(told), "crash" if crash else "plain"]
        began = time.monotonic()
        if way == "torchrun":
            self._torchrun(arguments, crash=crash)
        else:
            self._ours(way, arguments, crash=crash)
        return told, time.monotonic() - began

    def _torchrun(self, arguments: list[str], *, crash: bool) -> None:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        argv += [f"--max-restarts={int(crash)}", "job.py", *arguments]
        # With the store that torchrun shares out, its second attempt finds the addresses of the first one and fails.
        env = {**self.env, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        subprocess.run(argv, cwd=self.folder / "project", env=env, check=True, capture_output=True)

    def _ours(self, way: str, arguments: list[str], *, crash: bool) -> None:
        host = {"host": "localhost", "transport": "local", "gpus": 0, "workers": RANKS, "python": sys.executable}
        job = {"script": "job.py", "args": arguments, "framework": "keras", "start_method": way}
        document = {"version": 1, "name": "fork", "hosts": [host], "job": job, "env": {"OMP_NUM_THREADS": "1"}}
        document["restart"] = {"max_restarts": int(crash), "backoff": 0}
        (self.folder / "project/cluster.yaml").write_text(yaml.safe_dump(document))
        done = self._head.run("up", "--no-health", timeout=600.0)
        if done.returncode != 0 or ("forked from" in done.stderr) != (way == "fork"):
            raise RuntimeError(f"{way}: exit code {done.returncode}: {done.stderr}")


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the whole job, a restart, and memory, against torchrun and against starting anew."""
    whole: dict[str, list[float]] = {way: [] for way in WAYS}
    memory: dict[str, list[float]] = {way: [] for way in WAYS}
    again: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for _ in range(rounds):
            for way in WAYS:
                with _cpu(cpu[way]):
                    told, seconds = bench.run(way, crash=False)
                whole[way].append(seconds)
                memory[way].append(sum(value for _, value in _told(told, 0)) / 1024)
            for way in WAYS:
                told, _ = bench.run(way, crash=True)
                crashed = float((told / "crash").read_text())
                again[way].append(max(moment for moment, _ in _told(told, 1)) - crashed)
    yield _ratio("4 ranks Keras + torch, whole job, forked / torchrun", whole, "torchrun", 0.45)
    yield _ratio("the same, forked / started anew", whole, "spawn", None)
    if all(cpu.values()):
        yield _ratio("the same, CPU of all processes, forked / torchrun", cpu, "torchrun", None)
    yield _ratio("a rank crashes to the last first all-reduce / torchrun", again, "torchrun", 0.25)
    yield _ratio("the same, forked / started anew", again, "spawn", None)
    ours, theirs = statistics.median(memory["fork"]), statistics.median(memory["spawn"])
    detail = f"{ours:.0f} MiB against {theirs:.0f} MiB, proportional shares of all ranks"
    yield Measure(name="memory of 4 ranks, forked / started anew", value=ours / theirs, detail=detail)


def _told(folder: Path, attempt: int) -> list[tuple[float, float]]:
    words = [(folder / f"{attempt}.{rank}").read_text().split() for rank in range(RANKS)]
    return [(float(moment), float(share)) for moment, share in words]


def _ratio(name: str, samples: dict[str, list[float]], peer: str, goal: float | None) -> Measure:
    value = statistics.median(samples["fork"]) / statistics.median(samples[peer])
    return Measure(name=name, value=value, goal=goal, detail=f"{spread(samples['fork'])}; {spread(samples[peer])}")
