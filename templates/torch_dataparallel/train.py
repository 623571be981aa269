"""Train with DataParallel: one process that spreads each batch over the GPUs of one machine. For comparison only.

PyTorch itself advises DistributedDataParallel instead (see the template torch_ddp): DataParallel copies the model to
every GPU at every step, runs Python for all of them in one process, gathers all outputs on the first GPU, and cannot
reach a second machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=100, help="over all GPUs")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="fail below it")
    return parser.parse_args()


def build_model() -> nn.Module:
    """Return a small convnet."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(512, 10),
    )


def main() -> None:
    """Train in one process; further processes have nothing to do."""
    args = read_arguments()
    if int(os.environ.get("RANK", "0")) > 0:
        print("DataParallel is one process on one machine: only rank 0 trains")
        return
    gpus = torch.cuda.device_count()
    device = torch.device("cuda" if gpus else "cpu")
    if args.batch_size < max(gpus, 1):
        sys.exit(f"error: a batch of {args.batch_size} cannot be split over {gpus} GPUs; raise --batch-size")

    torch.manual_seed(0)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(digits.images, dtype=torch.float32) / 16)[order].unsqueeze(1).to(device)
    labels = torch.tensor(digits.target, dtype=torch.int64)[order].to(device)
    # Without GPUs, DataParallel calls the model directly. Its copies live for one step only. There is only one set of
    # weights, so there is nothing to compare.
    model = nn.DataParallel(build_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate)
    print(f"training in one process on {gpus} GPUs" if gpus else "training in one process on the CPU")

    losses = []
    for epoch in range(args.epochs):
        start, loss_sum = time.perf_counter(), 0.0
        for batch in torch.randperm(1437, generator=torch.Generator().manual_seed(epoch)).split(args.batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(batch)
        losses.append(loss_sum / 1437)
        print(f"epoch {epoch + 1}/{args.epochs}  loss {losses[-1]:.6f}  {time.perf_counter() - start:.1f}s")

    model.eval()
    with torch.no_grad():
        accuracy = (model(images[1437:]).argmax(-1) == labels[1437:]).float().mean().item()
    print(f"test accuracy {accuracy:.4f}")
    if accuracy < args.min_accuracy or losses[-1] > losses[0]:
        sys.exit(f"error: not learnt: loss {losses[0]:.4f} to {losses[-1]:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
