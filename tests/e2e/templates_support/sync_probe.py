"""A worker that breaks its weights in each way that its arguments name, and prints what verify_sync says."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import torch
import torch.distributed as dist

SYNC = Path(__file__).resolve().parents[3] / "clusterctl" / "agent" / "worker" / "weight_check.py"


def load_sync():
    """Load the file as a node does: without the rest of the package."""
    spec = importlib.util.spec_from_file_location("sync", SYNC)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_model(kind: str) -> torch.nn.Module:
    if kind.startswith("keras"):
        import keras

        return keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, name="dense"), keras.layers.BatchNormalization()]
        )
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def spoil(model: torch.nn.Module, kind: str, rank: int) -> None:
    with torch.no_grad():
        if kind == "one-bit" and rank == 2:
            weight = model[2].bias
            weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))
        elif kind == "two-ranks" and rank in (0, 2):
            model[0].weight.add_(rank + 1)
        elif kind == "nan":
            model[0].weight.fill_(torch.nan)
        elif kind.startswith("buffers"):
            model[1].running_mean.add_(rank)
        elif kind == "keras-statistics":
            model.layers[1].moving_mean.assign([float(rank)] * 4)
        elif kind == "keras-weights" and rank == 1:
            model.layers[0].kernel.assign(model.layers[0].kernel + 1)


def ask(sync, kind: str, rank: int) -> str:
    torch.manual_seed(0)
    model = make_model(kind)
    for tensor in model.state_dict().values():
        if dist.is_initialized():
            dist.broadcast(tensor, 0)
    spoil(model, kind, rank)
    try:
        sync.verify_sync(model, buffers=kind == "buffers-asked", step=7)
    except sync.OutOfSyncError as error:
        return str(error)
    return "same"


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    sync = load_sync()
    for kind in sys.argv[1:]:
        sys.stdout.write(f"{kind} {rank}: {ask(sync, kind, rank)}\n")
    sys.stdout.flush()
    if dist.is_initialized():
        dist.barrier()
        # Threads of torch that ask for the interpreter while it ends abort it now and then, whatever was taken apart
        # before: all that is to be said has been said.
        os._exit(0)


main()
