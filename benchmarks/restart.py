"""What a killed rank costs: from SIGKILL until all ranks have again done the step at which it was killed.

2 lab nodes with 2 ranks each train with gloo and write a checkpoint to a shared folder every 20 steps; rank 3 kills
itself at step 50. The peer is what a person types: `ssh` to each node, and torchrun there, with the c10d rendezvous and
`--max-restarts 1`. After the restart, each rank reads the checkpoint of step 40 and repeats ten steps.
"""

from __future__ import annotations

import functools
import shlex
import statistics
import sys
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.lab import BenchLab, lab
from benchmarks.measures import Measure, spread

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable

NODES, WORKERS = 2, 2
DEADLINE_S = 300.0
JOB = """\
import os, signal, sys, time
import torch
import torch.distributed as dist

base = f"/srv/shared/{sys.argv[1]}"
dist.init_process_group("gloo")
rank = dist.get_rank()
first, weights = 0, torch.zeros(1000)
if os.path.exists(base + ".pt"):
    first, weights = torch.load(base + ".pt")
is_restarted = os.path.exists(base + ".crash")
for step in range(first + 1, 61):
    gradient = torch.ones(1000)
    dist.all_reduce(gradient)
    weights += gradient
    time.sleep(0.01)
    if rank == 0 and step % 20 == 0:
        torch.save((step, weights), base + ".new")
        os.rename(base + ".new", base + ".pt")
    if step == 50 and is_restarted:
        with open(f"{base}.again{rank}", "w") as file:
            file.write(f"{time.monotonic()} {first} {weights[0].item()}")
    elif step == 50 and rank == 3:
        with open(base + ".crash", "w") as file:
            file.write(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the time that a killed rank costs, against torchrun by hand, and between the two ways to start."""
    samples: dict[str, list[float]] = {"fork": [], "spawn": [], "torchrun": []}
    with lab(NODES) as bench:
        (bench.head.folder / "job.py").write_text(JOB)
        (bench.lab.shared / "job.py").write_text(JOB)
        starts = {way: functools.partial(_start_ours, bench, way) for way in ("fork", "spawn")}
        starts["torchrun"] = functools.partial(_start_torchrun, bench, count(29500))
        for number in range(rounds):
            for way, start in starts.items():
                samples[way].append(_measure_restart(bench, f"{way}{number}", start))
    for way, peer in (("fork", "torchrun"), ("spawn", "torchrun"), ("fork", "spawn")):
        yield Measure(
            name=f"a killed rank until its step is done again, {way} / {peer}",
            value=statistics.median(samples[way]) / statistics.median(samples[peer]),
            detail=f"{spread(samples[way])}; {spread(samples[peer])}",
        )


def _start_ours(bench: BenchLab, way: str, tag: str) -> subprocess.Popen[bytes]:
    job = {"script": "job.py", "args": [tag], "start_method": way}
    restart = {"max_restarts": 1, "backoff": 0}
    bench.head.write(dict.fromkeys(bench.names, WORKERS), job, env={"OMP_NUM_THREADS": "1"}, restart=restart)
    return bench.start([sys.executable, "-m", "clusterctl", "up", "--no-health"], cwd=bench.head.folder)


def _start_torchrun(bench: BenchLab, ports: Iterable[int], tag: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}", f"--nproc-per-node={WORKERS}"]
    argv += ["--max-restarts=1", "--rdzv-backend=c10d", f"--rdzv-id={tag}"]
    argv += [f"--rdzv-endpoint={bench.nodes[0].address}:{next(iter(ports))}"]
    commands = []
    for number, node in enumerate(bench.nodes):
        # With the store that torchrun shares out, its second attempt finds the addresses of the first one and fails.
        env = {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": node.interface, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
        words = ["env", *(f"{k}={v}" for k, v in env.items()), *argv, f"--local-addr={node.address}"]
        # By the address alone, torchrun does not see on which node the rendezvous is.
        words.append(f"--rdzv-conf=is_host={number == 0}")
        log = f"/srv/shared/{tag}.{node.name}.log"
        commands.append((node.name, f"{shlex.join([*words, '/srv/shared/job.py', tag])} > {log} 2>&1"))
    return bench.ssh_loop(commands)


def _measure_restart(bench: BenchLab, tag: str, start: Callable[[str], subprocess.Popen[bytes]]) -> float:
    process = start(tag)
    process.wait(timeout=DEADLINE_S)
    marks = [bench.lab.shared / f"{tag}.again{rank}" for rank in range(NODES * WORKERS)]
    if not all(mark.exists() for mark in marks):
        logs = [log.read_text()[-3000:] for log in bench.lab.shared.glob(f"{tag}.*.log")]
        raise RuntimeError("\n".join([f"{tag} did not reach step 50 again on all ranks", *logs]))
    words = [mark.read_text().split() for mark in marks]
    if {(first, weight) for _, first, weight in words} != {("40", str(50.0 * NODES * WORKERS))}:
        raise RuntimeError(f"{tag} did not go on from step 40: {words}")
    return max(float(moment) for moment, _, _ in words) - float((bench.lab.shared / f"{tag}.crash").read_text())
