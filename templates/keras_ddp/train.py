"""Train a Keras convnet on the torch backend with DistributedDataParallel, one process per GPU (or CPU worker).

Every process runs this same file. The launcher sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Without these variables, the script trains in one process.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras reads this variable once, at import

import keras
import torch
import torch.distributed as dist
from keras import layers
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=["digits", "mnist"], default="digits")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--precision", choices=list(POLICIES), default="fp32")
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto")
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
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")


def load_data(name: str) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test images (N, height, width, 1) in 0..1 with their labels, the same on every rank."""
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = digits.images / 16.0, digits.target
        # The file is sorted by writer, so shuffle before the split, in the same order on all ranks.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
        train, test = order[:1437], order[1437:]
        parts = (images[train], labels[train]), (images[test], labels[test])
    else:
        parts = tuple((images / 255.0, labels) for images, labels in download_mnist())
    train_set, test_set = (
        TensorDataset(torch.tensor(x, dtype=torch.float32).unsqueeze(-1), torch.tensor(y, dtype=torch.int64))
        for x, y in parts
    )
    return train_set, test_set


def download_mnist() -> tuple:
    """Load MNIST: one process per node downloads it, the others then read the cache."""
    error, data = None, None
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    for turn in (True, False):
        if first == turn:
            try:
                data = keras.datasets.mnist.load_data()
            except Exception as problem:  # Keras raises a bare Exception for a failed download
                error = str(problem).splitlines()[0]
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if any(errors):
            reason = next(filter(None, errors))
            sys.exit(f"error: MNIST cannot be downloaded: {reason}; use --data digits, which needs no network")
    return data


def build_model(image_shape: tuple[int, ...]) -> keras.Model:
    """Return a small convnet with BatchNormalization that gives logits for ten classes."""
    steps = [
        keras.Input(image_shape),
        layers.Conv2D(16, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.Conv2D(32, 3, padding="same", strides=2, use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, dtype="float32"),  # logits stay in full precision under every policy
    ]
    return keras.Sequential(steps)


def train_epoch(ddp, loader, optimizer, scaler, device) -> torch.Tensor:
    """Train over the loader once; return the sums (loss, correct, samples) over all ranks."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in loader:
        images, labels = (tensor.to(device) for tensor in batch)
        optimizer.zero_grad()
        # Keras layers are in inference mode by default: without training=True, BatchNormalization would not learn.
        logits = ddp(images, training=True)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        scaler.scale(loss).backward()  # DDP averages the gradients over all ranks during the backward pass
        scaler.step(optimizer)
        scaler.update()
        correct = (logits.argmax(-1) == labels).sum()
        sums += torch.stack([loss.detach() * len(labels), correct, torch.full_like(correct, len(labels))])
    dist.all_reduce(sums)
    return sums


@torch.no_grad()
def evaluate(model, dataset, batch_size, device) -> float:
    """Return the accuracy over the whole data set; each rank evaluates its own part, and no sample counts twice."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = (tensor[rank::world_size] for tensor in dataset.tensors)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        correct += (model(x.to(device), training=False).argmax(-1) == y.to(device)).sum()
    dist.all_reduce(correct)
    return correct.item() / len(dataset)


@torch.no_grad()
def average_moving_statistics(model) -> None:
    """Average BatchNormalization's moving mean and variance over all ranks.

    DDP broadcasts *buffers* and averages *gradients*. Keras keeps moving statistics as torch Parameters with
    requires_grad=False, so they are neither: each rank has those of its own data, and evaluation and a saved model
    would depend on the rank. (In plain PyTorch they are buffers: DDP copies those of rank 0 before each forward.)
    """
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            for variable in (layer.moving_mean, layer.moving_variance):
                dist.all_reduce(variable.value)
                variable.value.div_(dist.get_world_size())


def check_identical_weights(model) -> None:
    """End the process unless every trainable weight is the same, bit for bit, on every rank."""
    digest = hashlib.sha256()
    for variable in model.trainable_variables:
        digest.update(variable.value.detach().cpu().numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    usual = max(digests, key=digests.count)
    odd = [rank for rank, its in enumerate(digests) if its != usual]
    if odd:
        sys.exit(f"error: weights differ: ranks {odd} differ from the other {len(digests) - len(odd)} ranks")
    if dist.get_rank() == 0:
        print(f"weights identical on all {len(digests)} ranks")


def main() -> None:
    """Return the device of this process, and make it the default device of Keras."""
    args = read_arguments()
    device = join_run(args.backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with keras.device(str(device)):
        run(args, device)
    # The objects of DDP refer to each other in cycles. If they outlive the process group, the garbage collector
    # destroys the group later while it holds the interpreter's lock, and a process sometimes hangs at its end.
    gc.collect()
    dist.destroy_process_group()


def run(args: argparse.Namespace, device: torch.device) -> None:
    """Train, evaluate, and check that all ranks have equal weights."""
    world_size = dist.get_world_size()
    say = print if dist.get_rank() == 0 else lambda *_: None

    keras.utils.set_random_seed(args.seed)
    keras.config.set_dtype_policy(POLICIES[args.precision])
    train_set, test_set = load_data(args.data)
    if len(train_set) < world_size * args.batch_size:
        sys.exit(
            f"error: {len(train_set)} samples do not fill one batch of {args.batch_size} on {world_size} ranks; "
            "lower --batch-size or start fewer workers"
        )

    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    model = build_model(tuple(train_set[0][0].shape)).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), args.learning_rate)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    say(f"training on {world_size} ranks, {device.type}, {dist.get_backend()}, {args.precision}")

    losses = []
    for epoch in range(args.epochs):
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # without this call every epoch has the same order
        loss_sum, correct, samples = train_epoch(ddp, loader, optimizer, scaler, device).tolist()
        losses.append(loss_sum / samples)
        seconds = time.perf_counter() - start
        say(f"epoch {epoch + 1}/{args.epochs}  loss {losses[-1]:.4f}  accuracy {correct / samples:.4f}  {seconds:.1f}s")

    check_identical_weights(model)
    average_moving_statistics(model)
    accuracy = evaluate(model, test_set, 256, device)
    say(f"test accuracy {accuracy:.4f}")
    if accuracy < args.min_accuracy:
        sys.exit(f"error: test accuracy {accuracy:.4f} is below {args.min_accuracy}")
    if losses[-1] > losses[0]:
        sys.exit(f"error: the loss rose from {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
