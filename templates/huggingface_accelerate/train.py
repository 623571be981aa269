"""Train with Hugging Face Accelerate: its Accelerator finds the other processes through the launcher's environment.

Neither `accelerate launch` nor `accelerate config` is needed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--precision", choices=["no", "bf16", "fp16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU (gloo) even if there are GPUs")
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="fail below it")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set, the same on every rank."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(digits.images, dtype=torch.float32) / 16)[order].unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def build_model() -> nn.Module:
    """Return a small convnet."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def train_epoch(accelerator: Accelerator, model, loader, optimizer) -> float:
    """Train over the loader once; return the mean loss over all ranks."""
    sums = torch.zeros(2, device=accelerator.device)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        sums += torch.stack([loss.detach() * len(labels), torch.full_like(loss, len(labels))])
    total, samples = accelerator.reduce(sums, reduction="sum").tolist()
    return total / samples


@torch.no_grad()
def evaluate(accelerator: Accelerator, model, loader) -> float:
    """Return the accuracy over all ranks; gather_for_metrics drops the repeated samples of padding."""
    model.eval()
    correct = samples = 0
    for images, labels in loader:
        right = accelerator.gather_for_metrics(model(images).argmax(-1) == labels)
        correct, samples = correct + int(right.sum()), samples + len(right)
    return correct / samples


def check_identical_weights(accelerator: Accelerator, model) -> None:
    """End the process unless every weight is the same, bit for bit, on every rank."""
    digest = hashlib.sha256()
    for parameter in accelerator.unwrap_model(model).parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    digests = gather_object([digest.hexdigest()])
    odd = [rank for rank, its in enumerate(digests) if its != digests[0]]
    if odd:
        sys.exit(f"error: weights differ: ranks {odd} differ from rank 0")
    if accelerator.is_main_process:
        print(f"weights identical on all {len(digests)} ranks")


def run(args: argparse.Namespace, accelerator: Accelerator) -> None:
    """Train, evaluate, and check that all ranks have equal weights."""
    say = print if accelerator.is_main_process else lambda *_: None  # accelerator.print would print once per node
    set_seed(0)
    train_set, test_set = load_data()
    if len(train_set) < accelerator.num_processes * args.batch_size:
        sys.exit(
            f"error: {len(train_set)} samples do not fill one batch of {args.batch_size} on "
            f"{accelerator.num_processes} ranks; lower --batch-size or start fewer workers"
        )
    model = build_model()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), args.learning_rate),
        DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True),
        DataLoader(test_set, 64),
    )
    say(f"training on {accelerator.num_processes} ranks, {accelerator.device.type}, {args.precision}")

    losses = []
    for epoch in range(args.epochs):
        start = time.perf_counter()
        train_loader.set_epoch(epoch)
        losses.append(train_epoch(accelerator, model, train_loader, optimizer))
        say(f"epoch {epoch + 1}/{args.epochs}  loss {losses[-1]:.4f}  {time.perf_counter() - start:.1f}s")

    check_identical_weights(accelerator, model)
    accuracy = evaluate(accelerator, model, test_loader)
    say(f"test accuracy {accuracy:.4f}")
    if accuracy < args.min_accuracy or losses[-1] > losses[0]:
        sys.exit(f"error: not learnt: loss {losses[0]:.4f} to {losses[-1]:.4f}, test accuracy {accuracy:.4f}")


def main() -> None:
    """Join the process group, train, and leave the group."""
    args = read_arguments()
    # Without GPUs and without cpu=True, every process of Accelerate trains alone, also under a launcher.
    accelerator = Accelerator(mixed_precision=args.precision, cpu=args.cpu or not torch.cuda.is_available())
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(
            f"error: the launcher started {os.environ['WORLD_SIZE']} ranks, Accelerate sees {accelerator.num_processes}"
        )
    run(args, accelerator)
    # The objects of DDP refer to each other in cycles. If they outlive the process group, the garbage collector
    # destroys the group later while it holds the interpreter's lock, and a process sometimes hangs at its end.
    gc.collect()
    accelerator.end_training()


if __name__ == "__main__":
    main()
