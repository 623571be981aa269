"""Measure how training scales: samples per second on 1, 2, 4 ... ranks of one run, for a convnet under DDP.

Each number of ranks is measured with the same work per rank, so twice the ranks should process twice the samples.
Replace `build_model` and `make_batch` by your own to measure your job.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=30, help="measured steps per number of ranks")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the measured ones")
    parser.add_argument("--ranks", help="numbers of ranks to measure, e.g. 1,2,8; by default 1, 2, 4 ... and all")
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto")
    return parser.parse_args()


def join_run(backend: str) -> torch.device:
    """Join the process group; return the device of this rank: its GPU for NCCL, the CPU for gloo."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if backend == "auto":
        backend = "nccl" if gpus >= local_world_size else "gloo"
    if backend == "nccl" and local_world_size > gpus:
        sys.exit(
            f"error: --backend nccl needs a GPU per worker: {local_world_size} workers here, torch sees {gpus} GPUs; "
            "use --backend gloo, start fewer workers, or install a CUDA build of torch"
        )
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def build_model() -> nn.Module:
    """Return a convnet of 1.1 million parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 16 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_batch(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images of 32 x 32 with labels."""
    return torch.randn(size, 3, 32, 32, device=device), torch.randint(0, 10, (size,), device=device)


def choose_sizes(text: str | None, world_size: int) -> list[int]:
    """Return the numbers of ranks to measure."""
    if text is None:
        return sorted({2**power for power in range(world_size.bit_length()) if 2**power <= world_size} | {world_size})
    sizes = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if not all(0 < size <= world_size for size in sizes):
        sys.exit(f"error: --ranks {text}: write numbers from 1 to {world_size}, e.g. 1,{world_size}")
    return sorted({*sizes})


def measure_step_s(group: dist.ProcessGroup, device: torch.device, args: argparse.Namespace) -> float:
    """Return the median duration of a step on the ranks of a group, in seconds."""
    model = DistributedDataParallel(
        build_model().to(device), device_ids=[device.index] if device.type == "cuda" else None, process_group=group
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    durations = []
    for _ in range(args.warm_up + args.steps):
        start = time.perf_counter()
        images, labels = make_batch(args.batch_size, device)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start)
    return statistics.median(durations[args.warm_up :])


def run(args: argparse.Namespace, device: torch.device) -> None:
    """Measure each number of ranks in turn; rank 0 prints a row for each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_: None
    say(f"up to {world_size} ranks, {device.type}, {dist.get_backend()}, {args.batch_size} samples per rank and step")
    say(f"{'RANKS':>5}  {'SAMPLES/S':>9}  {'SPEED-UP':>8}  {'EFFICIENCY':>10}")
    first_rate = None
    for size in choose_sizes(args.ranks, world_size):
        group = dist.new_group(range(size))
        if rank < size:
            rate = size * args.batch_size / measure_step_s(group, device, args)
            first_rate = first_rate or rate / size
            speedup = rate / first_rate
            say(f"{size:5}  {rate:9.0f}  {speedup:8.2f}  {speedup / size:10.0%}")
        gc.collect()  # the objects of DDP refer to each other in cycles and must not outlive their group
        dist.barrier()  # the ranks outside the group wait here and do not disturb the measurement


def main() -> None:
    """Join the process group, measure, and leave the group."""
    args = read_arguments()
    run(args, join_run(args.backend))
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
