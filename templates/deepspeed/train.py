"""Train with DeepSpeed ZeRO: optimizer state and gradients are spread over the ranks.

`deepspeed.init_distributed` finds the other processes through the launcher's environment; neither the `deepspeed`
launcher nor a hostfile is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time

import deepspeed
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--zero-stage", type=int, choices=[0, 1, 2, 3], default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="fail below it")
    return parser.parse_args()


def join_run() -> torch.device:
    """Join the process group; return the device of this process."""
    if "RANK" not in os.environ:  # without these variables DeepSpeed looks for MPI
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)
    accelerator = deepspeed.get_accelerator()
    if accelerator.device_name() == "cpu":
        deepspeed.init_distributed("gloo", verbose=False)
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= accelerator.device_count():
        sys.exit(
            f"error: local rank {local_rank} has no GPU of its own, this node shows {accelerator.device_count()}; "
            "start fewer workers, or set DS_ACCELERATOR=cpu"
        )
    accelerator.set_device(local_rank)
    deepspeed.init_distributed(accelerator.communication_backend_name(), verbose=False)
    return torch.device(accelerator.device_name(local_rank))


def load_data(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return training images and labels, then test images and labels, the same on every rank."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(digits.images, dtype=torch.float32) / 16)[order].unsqueeze(1).to(device)
    labels = torch.tensor(digits.target, dtype=torch.int64)[order].to(device)
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def build_engine(args: argparse.Namespace) -> deepspeed.DeepSpeedEngine:
    """Wrap a small convnet and its optimizer."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "zero_optimization": {"stage": args.zero_stage},
        "zero_allow_untested_optimizer": True,  # torch's own AdamW needs no C++ compiler on the nodes
        "bf16": {"enabled": args.precision == "bf16"},
    }
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train_epoch(engine, images, labels, epoch: int, args) -> float:
    """Train on every full batch once; return the mean loss over all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    losses = []
    for batch in order.split(args.batch_size * world_size):
        if len(batch) == args.batch_size * world_size:
            mine = batch[rank::world_size]
            logits = engine(images[mine].to(engine_dtype(args))).float()
            loss = nn.functional.cross_entropy(logits, labels[mine])
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / world_size


def engine_dtype(args: argparse.Namespace) -> torch.dtype:
    """Return the number type in which the engine computes."""
    return torch.bfloat16 if args.precision == "bf16" else torch.float32


@torch.no_grad()
def evaluate(engine, images, labels, args) -> float:
    """Return the accuracy. Every rank evaluates all images, because in stage 3 each forward pass needs every rank."""
    engine.eval()
    return (engine(images.to(engine_dtype(args))).argmax(-1) == labels).float().mean().item()


def check_identical_weights(engine) -> None:
    """End the process unless all ranks have bitwise equal weights. In stage 3, weights are gathered first."""
    digest = hashlib.sha256()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for parameter in engine.module.parameters():
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    odd = [rank for rank, its in enumerate(digests) if its != digests[0]]
    if odd:
        sys.exit(f"error: weights differ: ranks {odd} differ from rank 0")
    if dist.get_rank() == 0:
        print(f"weights identical on all {len(digests)} ranks")


def main() -> None:
    """Train, evaluate, and check that all ranks have equal weights."""
    args = read_arguments()
    device = join_run()
    world_size = dist.get_world_size()
    say = print if dist.get_rank() == 0 else lambda *_: None
    images, labels, test_images, test_labels = load_data(device)
    if len(images) < world_size * args.batch_size:
        sys.exit(
            f"error: {len(images)} samples do not fill one batch of {args.batch_size} on {world_size} ranks; "
            "lower --batch-size or start fewer workers"
        )
    torch.manual_seed(0)
    engine = build_engine(args)
    say(f"training on {world_size} ranks, {device.type}, ZeRO stage {args.zero_stage}, {args.precision}")

    losses = []
    for epoch in range(args.epochs):
        start = time.perf_counter()
        losses.append(train_epoch(engine, images, labels, epoch, args))
        say(f"epoch {epoch + 1}/{args.epochs}  loss {losses[-1]:.4f}  {time.perf_counter() - start:.1f}s")

    check_identical_weights(engine)
    accuracy = evaluate(engine, test_images, test_labels, args)
    say(f"test accuracy {accuracy:.4f}")
    if accuracy < args.min_accuracy or losses[-1] > losses[0]:
        sys.exit(f"error: not learnt: loss {losses[0]:.4f} to {losses[-1]:.4f}, test accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
