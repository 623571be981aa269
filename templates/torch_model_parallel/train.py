"""Train one model that is split over processes: by parameters (FSDP2), by matrices (tensor parallel) or by layers.

The same network is first trained unsplit in every process; the split one must follow it step by step.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# One training step: images and labels of the whole batch in, (loss, correct answers) over the whole batch out.
Step = Callable[[torch.Tensor, torch.Tensor], tuple[float, int]]


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=[*MODES, "all"], default="fsdp")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=96, help="over all ranks")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4, help="blocks between the first and the last layer")
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto")
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="fail if the last epoch's accuracy is lower")
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


class Block(nn.Module):
    """Two matrices around a nonlinearity, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block."""
        return x + self.down(torch.relu(self.up(x)))


def build_model(args: argparse.Namespace) -> nn.Sequential:
    """Return the whole network, with the same weights in every process."""
    torch.manual_seed(0)
    blocks = [Block(args.width) for _ in range(args.depth)]
    return nn.Sequential(nn.Linear(64, args.width), *blocks, nn.Linear(args.width, 10))


def mesh_of_nodes(device: torch.device, names: tuple[str, str]) -> DeviceMesh:
    """Arrange all ranks as (nodes, workers of a node): the fast dimension stays within a node."""
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes, rest = divmod(dist.get_world_size(), workers)
    if rest:
        sys.exit("error: nodes have different numbers of workers, so they form no mesh; use --mode pipeline")
    return init_device_mesh(device.type, (nodes, workers), mesh_dim_names=names)


def whole_model_step(model: nn.Module, args: argparse.Namespace, part: int = 0, parts: int = 1) -> Step:
    """Return a training step for a model that runs as a whole on its part of the batch."""
    # With foreach, one call would get plain and distributed parameters, which torch refuses.
    optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9, foreach=False)

    def step(images: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
        mine, answers = images[part::parts], labels[part::parts]
        optimizer.zero_grad()
        logits = model(mine)
        loss = nn.functional.cross_entropy(logits, answers)
        loss.backward()
        optimizer.step()
        sums = torch.stack([loss.detach() / parts, (logits.argmax(-1) == answers).sum()])
        if parts > 1:  # every part is on the same number of ranks
            dist.all_reduce(sums)
            sums *= parts / dist.get_world_size()
        return sums[0].item(), round(sums[1].item())

    return step


def fsdp(model: nn.Sequential, args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Step]:
    """Shard parameters, gradients and optimizer state within a node, and replicate them over nodes."""
    mesh = mesh_of_nodes(device, ("replicate", "shard"))
    for layer in model:
        fully_shard(layer, mesh=mesh)  # each layer is gathered just before its use and freed afterwards
    fully_shard(model, mesh=mesh)
    return model, whole_model_step(model, args, dist.get_rank(), dist.get_world_size())


def tensor(model: nn.Sequential, args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Step]:
    """Split every block's matrices within a node (one all-reduce per block), and the data over nodes."""
    mesh = mesh_of_nodes(device, ("data", "tensor"))
    workers = mesh["tensor"].size()
    if 2 * args.width % workers:
        sys.exit(f"error: --width {args.width} does not divide over the {workers} workers of a node")
    for layer in model[1:-1]:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model, whole_model_step(model, args, mesh["data"].get_local_rank(), mesh["data"].size())


def pipeline(model: nn.Sequential, args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Step]:
    """Give each rank some consecutive layers; micro-batches keep all ranks busy (schedule 1F1B)."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    if stages > len(model):
        sys.exit(f"error: {len(model)} layers do not fill {stages} pipeline stages; raise --depth")
    bounds = [len(model) * stage // stages for stage in range(stages + 1)]
    layers = model[bounds[rank] : bounds[rank + 1]]  # a slice keeps the names of the layers, which `compare` needs
    micro_batches = 2 * stages
    if args.batch_size % micro_batches:
        sys.exit(f"error: --batch-size {args.batch_size} does not divide into {micro_batches} micro-batches")
    stage = PipelineStage(layers, rank, stages, device)
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(layers.parameters(), args.learning_rate, momentum=0.9)
    first, last = rank == 0, rank == stages - 1

    def step(images: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        inputs = (images,) if first else ()
        logits = schedule.step(*inputs, **({"target": labels, "losses": losses} if last else {}))
        optimizer.step()
        sums = torch.zeros(2, device=device)
        if last:  # only the last stage knows loss and accuracy
            sums = torch.stack([torch.stack(losses).mean().detach(), (logits.argmax(-1) == labels).sum()])
        dist.broadcast(sums, src=stages - 1)
        return sums[0].item(), round(sums[1].item())

    return layers, step


MODES = {"fsdp": fsdp, "tensor": tensor, "pipeline": pipeline}


def train(step: Step, args: argparse.Namespace, device: torch.device, say: Callable) -> list[tuple[float, float]]:
    """Train and return (loss, accuracy) of each epoch."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64, device=device)
    history = []
    for epoch in range(args.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        batches = [b for b in order.split(args.batch_size) if len(b) == args.batch_size]
        results = [step(images[batch], labels[batch]) for batch in batches]
        loss = sum(loss for loss, _ in results) / len(batches)
        accuracy = sum(correct for _, correct in results) / (len(batches) * args.batch_size)
        history.append((loss, accuracy))
        say(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.6f}  accuracy {accuracy:.4f}")
    return history


def compare(split: nn.Module, whole: nn.Module) -> float:
    """Return the largest difference over all ranks between the split model's weights and the unsplit one's."""
    reference = dict(whole.named_parameters())
    worst = torch.zeros((), device=next(whole.parameters()).device)
    with torch.no_grad():
        for name, parameter in split.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            worst = torch.maximum(worst, (full - reference[name]).abs().max())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def main() -> None:
    """Train the unsplit and the split model, and compare them."""
    args = read_arguments()
    device = join_run(args.backend)
    world_size = dist.get_world_size()
    if args.batch_size % world_size:
        sys.exit(f"error: --batch-size {args.batch_size} does not divide over {world_size} ranks")

    whole = build_model(args).to(device)
    expected = train(whole_model_step(whole, args), args, device, say=lambda *_: None)
    for mode in MODES if args.mode == "all" else [args.mode]:
        train_split(mode, args, device, whole, expected[-1][0])
    # The process groups of a mesh refer to each other in cycles. If they outlive the default group, the garbage
    # collector destroys them later, and a process sometimes hangs at its end.
    gc.collect()
    dist.destroy_process_group()


def train_split(mode: str, args: argparse.Namespace, device: torch.device, whole: nn.Module, expected: float) -> None:
    """Train the split model; end the process if its last loss differs from that of the unsplit model."""
    say = print if dist.get_rank() == 0 else lambda *_: None
    split, step = MODES[mode](build_model(args).to(device), args, device)
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in split.parameters())
    total = sum(parameter.numel() for parameter in whole.parameters())
    say(f"{mode} on {dist.get_world_size()} ranks, {device.type}, {dist.get_backend()}")
    say(f"rank 0 holds {held} of {total} weights")

    history = train(step, args, device, say)
    drift = compare(split, whole)
    say(f"weights equal those of the unsplit model to within {drift:.1e}")
    (first_loss, _), (last_loss, accuracy) = history[0], history[-1]
    if drift > 1e-3 or abs(last_loss - expected) > 1e-3:
        sys.exit(f"error: the split model deviates: loss {last_loss:.6f}, unsplit {expected:.6f}")
    if last_loss > first_loss or accuracy < args.min_accuracy:
        sys.exit(f"error: not learnt: loss {first_loss:.4f} to {last_loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
