"""Train with checkpoints: an interrupted and resumed run ends with exactly the same weights as an uninterrupted one.

Three things make the result exact. A checkpoint contains weights and optimizer. The step number determines the batch
and the random numbers of dropout. A checkpoint is either complete or absent.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=96, help="over all ranks")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--directory", type=Path, default=Path("checkpoints"))
    parser.add_argument("--every", type=int, default=20, metavar="STEPS", help="save this often")
    parser.add_argument(
        "--keep", type=int, default=3, help="number of newest checkpoints to keep, in addition to the best one"
    )
    parser.add_argument("--sharded", action="store_true", help="shard the model (FSDP2); every rank writes its part")
    parser.add_argument("--per-node", action="store_true", help="the directory is not shared: each node writes a copy")
    parser.add_argument(
        "--resume",
        type=Path,
        help="checkpoint to resume from; default: $CLUSTERCTL_RESUME_FROM, else start from scratch",
    )
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto")
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="fail below it")
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
    images = (torch.tensor(digits.data, dtype=torch.float32) / 16)[order].to(device)
    labels = torch.tensor(digits.target, dtype=torch.int64)[order].to(device)
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def batch_of_step(step: int, samples: int, batch_size: int) -> torch.Tensor:
    """Return the sample indices of this rank for a step. They depend only on the step, so no loader must be saved."""
    epoch, place = divmod(step, samples // batch_size)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
    return order[place * batch_size : (place + 1) * batch_size][dist.get_rank() :: dist.get_world_size()]


def settle_buckets(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Let DDP arrange its buckets before the first step of each attempt.

    After the first backward pass, DDP regroups the gradients in the order of their arrival. With three or more ranks,
    the position of a gradient determines the order of its sum over the ranks, and so the rounding. Without this
    function, the first step after a resume would be rounded differently from the same step of an uninterrupted run.
    """
    nn.functional.cross_entropy(model(images), labels).backward()
    model.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Return (loss, accuracy) on the test images. A sharded model needs all ranks, so each evaluates all images."""
    model.eval()
    logits = model(images)
    model.train()
    return nn.functional.cross_entropy(logits, labels).item(), (logits.argmax(-1) == labels).float().mean().item()


def is_writer(args: argparse.Namespace) -> bool:
    """Return whether this process deletes old checkpoints: one process for each directory does."""
    return (int(os.environ.get("LOCAL_RANK", "0")) if args.per_node else dist.get_rank()) == 0


def save(step: int, loss: float, model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> None:
    """Write a checkpoint under a temporary name, then rename it: no incomplete checkpoint has the final name."""
    final = args.directory / f"step-{step:08d}"
    partial = args.directory / f".{final.name}.partial"
    writes = is_writer(args)
    if writes:
        shutil.rmtree(partial, ignore_errors=True)  # left over from an attempt that died while it saved a checkpoint
        partial.mkdir(parents=True)
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer)
    if args.sharded:
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=partial)
    elif writes:
        torch.save({"model": weights, "optimizer": moments}, partial / "state.pt")
    if writes:
        about = {"step": step, "loss": loss, "world_size": dist.get_world_size(), "sharded": args.sharded}
        about["files"] = {file.name: digest(file) for file in sorted(partial.iterdir())}
        (partial / "about.json").write_text(json.dumps(about))
        for path in [*partial.iterdir(), partial]:
            flush(path)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        flush(args.directory)
        prune(args.directory, args.keep)
    dist.barrier()


def set_aside(directory: Path, writes: bool) -> None:
    """Move checkpoints of an earlier run to another directory: a restart of this run must not find them."""
    if writes and any(directory.glob("step-*")):
        number = 1
        while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
            number += 1
        directory.rename(aside)
        print(f"checkpoints of an earlier run moved to {aside}")
    dist.barrier()


def digest(file: Path) -> str:
    """Return the digest of a file, which shows whether the file is complete."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def prune(directory: Path, keep: int) -> None:
    """Point `best` at the checkpoint with the lowest loss; delete all other checkpoints except the newest ones."""
    saved = sorted(directory.glob("step-*"))
    best = min(saved, key=lambda path: json.loads((path / "about.json").read_text())["loss"])
    link = directory / ".best.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(best.name)
    link.replace(directory / "best")
    for path in saved[:-keep]:
        if path != best:
            shutil.rmtree(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> int:
    """Restore a checkpoint; return the number of steps that the model has been trained."""
    problem, about = inspect(path, args.sharded)
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)  # all ranks stop together, so no rank waits for a stopped one
    if any(problems):
        sys.exit(f"error: cannot resume from {path}: {next(filter(None, problems))}")
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if args.sharded:
        dcp.load(state, checkpoint_id=path)
    else:
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return about["step"]


def inspect(path: Path, sharded: bool) -> tuple[str | None, dict]:
    """Return the reason why a checkpoint cannot be used (or None), and the checkpoint's description."""
    try:
        about = json.loads((path / "about.json").read_text())
        torn = [name for name, expected in about["files"].items() if digest(path / name) != expected]
    except (OSError, ValueError, KeyError) as error:
        return f"it is incomplete or not a checkpoint ({error}); delete it, then the job loads an older one", {}
    if torn:
        return f"it is damaged: {torn[0]} has changed; delete the checkpoint, then the job loads an older one", about
    if about["sharded"] != sharded:
        return (
            f"it was written {'with' if about['sharded'] else 'without'} --sharded; start the job in the same way",
            about,
        )
    if about["world_size"] != dist.get_world_size():
        # The weights would load, but the ranks would see other batches, so the result would differ.
        remedy = f"start {about['world_size']} workers, or begin a new run"
        return f"it is from {about['world_size']} ranks, this run has {dist.get_world_size()}; {remedy}", about
    return None, about


def fingerprint(model: nn.Module) -> str:
    """Return a digest of all weights; sharded weights are gathered first."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        whole.update(full.detach().cpu().numpy().tobytes())
    return whole.hexdigest()


def run(args: argparse.Namespace, device: torch.device) -> None:
    """Train from the newest checkpoint or from scratch until the last step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_: None
    if args.batch_size < world_size:
        sys.exit(
            f"error: a batch of {args.batch_size} leaves some of {world_size} ranks without data; raise --batch-size"
        )
    if args.sharded and args.per_node:
        sys.exit("error: a sharded checkpoint has parts of all ranks and needs a directory that all nodes share")

    images, labels, test_images, test_labels = load_data(device)
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    model: nn.Module = nn.Sequential(*layers).to(device)
    model = fully_shard(model) if args.sharded else DistributedDataParallel(model)
    settle_buckets(model, images[:1], labels[:1])
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate)

    resume = args.resume or os.environ.get("CLUSTERCTL_RESUME_FROM")
    if not resume:
        set_aside(args.directory, is_writer(args))
    done = load(Path(resume), model, optimizer, args) if resume else 0
    say(f"resumed from {resume} at step {done}" if resume else "started anew")
    first_loss, _ = evaluate(model, test_images, test_labels)
    for step in range(done, args.steps):
        torch.manual_seed(step * world_size + rank)  # the step also determines the random numbers of dropout
        indices = batch_of_step(step, len(images), args.batch_size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[indices]), labels[indices]).backward()
        optimizer.step()
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            loss, accuracy = evaluate(model, test_images, test_labels)
            save(step + 1, loss, model, optimizer, args)
            say(f"step {step + 1}/{args.steps}  test loss {loss:.4f}  accuracy {accuracy:.4f}  saved")

    loss, accuracy = evaluate(model, test_images, test_labels)
    digests = [""] * world_size
    dist.all_gather_object(digests, fingerprint(model))
    odd = [rank for rank, its in enumerate(digests) if its != digests[0]]
    if odd:
        sys.exit(f"error: weights differ: ranks {odd} differ from rank 0")
    say(f"weights identical on all {world_size} ranks")
    say(f"test accuracy {accuracy:.4f}  final weights {digests[0][:16]}")
    if accuracy < args.min_accuracy or (done < args.steps and loss > first_loss):
        sys.exit(f"error: not learnt: test loss {first_loss:.4f} to {loss:.4f}, accuracy {accuracy:.4f}")


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
