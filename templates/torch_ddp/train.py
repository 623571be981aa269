"""Train a small network with DistributedDataParallel in plain PyTorch.

Shows gradient accumulation without needless communication, mixed precision, per-rank seeds, a profiler trace per rank,
and data that does not divide evenly among the ranks. A global batch gives the same step on any number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=100, help="over all ranks, per optimizer step")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-steps per optimizer step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a trace of the second epoch per rank")
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="fail below it")
    parser.add_argument("--seed", type=int, default=0)
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


def load_data(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return training images and labels, then test images and labels, the same on every rank."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(digits.images, dtype=torch.float32) / 16)[order].unsqueeze(1).to(device)
    labels = torch.tensor(digits.target, dtype=torch.int64)[order].to(device)
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def build_model(dropout: float) -> nn.Module:
    """Return a small convnet."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(512, 10),
    )


def split_evenly_enough(indices: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Split into exactly `parts` pieces without dropping or padding; some may be one item shorter, or empty."""
    return [indices[part::parts] for part in range(parts)]


def train_epoch(ddp, optimizer, scaler, images, labels, epoch, args) -> torch.Tensor:
    """Train on every sample once; return the sums (loss, correct, samples) over all ranks."""
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), images.device
    half = torch.float16 if args.precision == "fp16" else torch.bfloat16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed * 100_003 + epoch))
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in order.split(args.batch_size):
        micro_batches = split_evenly_enough(split_evenly_enough(batch, world_size)[rank], args.accumulate)
        for step, indices in enumerate(micro_batches, start=1):
            # Gradients accumulate locally; only the last backward pass of an optimizer step exchanges them.
            with ddp.no_sync() if step < args.accumulate else contextlib.nullcontext():
                with torch.autocast(device.type, dtype=half, enabled=args.precision != "fp32"):
                    logits = ddp(images[indices])
                    loss = nn.functional.cross_entropy(logits, labels[indices], reduction="sum")
                # DDP averages over ranks. Ranks whose parts differ in size must weigh by samples, not by rank: divide
                # by the whole batch and undo DDP's division. A rank with an empty part still takes part, with zeros.
                scaler.scale(loss * world_size / len(batch)).backward()
            correct = (logits.argmax(-1) == labels[indices]).sum()
            sums += torch.stack([loss.detach(), correct, torch.full_like(correct, len(indices))])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    dist.all_reduce(sums)
    return sums


@torch.no_grad()
def evaluate(model, images, labels) -> float:
    """Return the accuracy over all test images; each rank evaluates its own part."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    correct = (model(images[rank::world_size]).argmax(-1) == labels[rank::world_size]).sum()
    dist.all_reduce(correct)
    return correct.item() / len(labels)


def check_identical_weights(model: nn.Module) -> None:
    """End the process unless every weight is the same, bit for bit, on every rank."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    usual = max(digests, key=digests.count)
    odd = [rank for rank, its in enumerate(digests) if its != usual]
    if odd:
        sys.exit(f"error: weights differ: ranks {odd} differ from the other {len(digests) - len(odd)} ranks")
    if dist.get_rank() == 0:
        print(f"weights identical on all {len(digests)} ranks")


def profiler(directory: Path | None, epoch: int):
    """Return a context that traces the second epoch, or one that does nothing."""
    if directory is None or epoch != 1:
        return contextlib.nullcontext()
    directory.mkdir(parents=True, exist_ok=True)
    trace = directory / f"trace-rank{dist.get_rank()}.json"
    return torch.profiler.profile(on_trace_ready=lambda profile: profile.export_chrome_trace(str(trace)))


def run(args: argparse.Namespace, device: torch.device) -> None:
    """Train, evaluate, and check that all ranks have equal weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_: None
    if args.batch_size < world_size * args.accumulate:
        sys.exit(
            f"error: a batch of {args.batch_size} cannot be split over {world_size} ranks x {args.accumulate} "
            "micro-steps; raise --batch-size"
        )

    images, labels, test_images, test_labels = load_data(device)
    torch.manual_seed(args.seed)  # the same initial weights on all ranks (DDP would send those of rank 0 anyway) ...
    model = build_model(args.dropout).to(device)
    torch.manual_seed(args.seed + 1 + rank)  # ... but different dropout masks on each rank
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), args.learning_rate)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    say(f"training on {world_size} ranks, {device.type}, {dist.get_backend()}, {args.precision}")

    losses = []
    for epoch in range(args.epochs):
        start = time.perf_counter()
        with profiler(args.profile, epoch):
            sums = train_epoch(ddp, optimizer, scaler, images, labels, epoch, args)
        loss_sum, correct, samples = sums.tolist()
        losses.append(loss_sum / samples)
        seconds = time.perf_counter() - start
        say(f"epoch {epoch + 1}/{args.epochs}  loss {losses[-1]:.6f}  accuracy {correct / samples:.4f}  {seconds:.1f}s")

    check_identical_weights(model)
    accuracy = evaluate(model.eval(), test_images, test_labels)
    say(f"test accuracy {accuracy:.4f}")
    if accuracy < args.min_accuracy:
        sys.exit(f"error: test accuracy {accuracy:.4f} is below {args.min_accuracy}")
    if losses[-1] > losses[0]:
        sys.exit(f"error: the loss rose from {losses[0]:.4f} to {losses[-1]:.4f}")


def main() -> None:
    """Join the process group, train, and leave the group."""
    args = read_arguments()
    run(args, join_run(args.backend))
    # The objects of DDP refer to each other in cycles. If they outlive the process group, the garbage collector
    # destroys the group later while it holds the interpreter's lock, and a process sometimes hangs at its end.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
