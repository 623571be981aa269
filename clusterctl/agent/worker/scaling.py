"""The built-in model of `clusterctl bench`: a small convnet that measures where its own time goes.

Started as `python -m clusterctl.agent.worker.scaling` by every worker; rank 0 prints one line for each mode, `MARK` and
JSON. The data set and the global batch are the same for any number of workers (strong scaling), so that an epoch is the
same work everywhere. Imports torch when run, never when imported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MARK", "main"]

MARK = "clusterctl-bench "
_WARM_UP_STEPS = 2


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The built-in model of clusterctl bench.")
    parser.add_argument("--modes", default="ddp", help="of single, dp, ddp, separated by commas")
    parser.add_argument("--epochs", type=int, default=3, help="measured ones; their median counts")
    parser.add_argument("--samples", type=int, default=2048, help="images of an epoch")
    parser.add_argument("--batch", type=int, default=256, help="images of a step, over all workers")
    parser.add_argument("--most", type=int, default=1, help="workers that ever share this machine, and so its cores")
    return parser.parse_args(words)


class _Timer:
    """Seconds of the parts of an epoch, each part awaited on the device."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self.parts = {"data": 0.0, "compute": 0.0, "comm": 0.0, "wait": 0.0}
        self._settle = settle
        self._since = 0.0

    def begin(self) -> None:
        self._settle()
        self._since = time.perf_counter()

    def end(self, part: str) -> None:
        self._settle()
        now = time.perf_counter()
        self.parts[part] += now - self._since
        self._since = now


class _Bench:
    """Model, data and clock of one worker."""

    def __init__(self, torch: Any, options: argparse.Namespace) -> None:
        self.torch, self.options = torch, options
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = (
            torch.device("cuda", local_rank) if torch.cuda.device_count() > local_rank else torch.device("cpu")
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            # As many threads for one worker alone as for one of many: else the first would have all cores to itself.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.most))
        generator = torch.Generator().manual_seed(0)
        count = options.samples
        self.images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(0, 10, (count,), generator=generator)

    # --- parts of a step

    def settle(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def batch(self, step: int, share: int) -> tuple[Any, Any]:
        """Make this worker's share of a batch: a flip, a shift, and numbers around zero, as image pipelines do."""
        torch = self.torch
        first = step * self.options.batch + self.rank % share * (self.options.batch // share)
        at = slice(first, first + self.options.batch // share)
        images = torch.nn.functional.pad(self.images[at], (4, 4, 4, 4))
        x, y = (step * 5) % 9, (step * 7) % 9
        images = images[:, :, y : y + 32, x : x + 32].float().div_(127.5).sub_(1.0)
        images = images.flip(-1) if step % 2 else images
        return images.to(self.device), self.labels[at].to(self.device)

    def model(self) -> Any:
        nn = self.torch.nn
        self.torch.manual_seed(0)
        layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU()]
        layers += [nn.Conv2d(64, 64, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 256), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(256, 10)).to(self.device)

    # --- epochs

    def learn(self, model: Any, images: Any, labels: Any) -> None:
        self.torch.nn.functional.cross_entropy(model(images), labels).backward()

    def plain_epoch(self, model: Any, optimizer: Any, share: int, steps: int) -> float:
        """Train as a script does; return its seconds on this worker."""
        self.settle()
        began = time.perf_counter()
        for step in range(steps):
            optimizer.zero_grad()
            self.learn(model, *self.batch(step, share))
            optimizer.step()
        self.settle()
        return time.perf_counter() - began

    def taken_apart(self, model: Any, optimizer: Any, share: int, steps: int) -> dict[str, float]:
        """Train with the parts one after the other; `comm` is the exchange alone, once all workers have arrived."""
        import torch.distributed as dist

        timer = _Timer(self.settle)
        timer.begin()
        for step in range(steps):
            images, labels = self.batch(step, share)
            timer.end("data")
            optimizer.zero_grad()
            if share == 1:
                self.learn(model, images, labels)
            else:
                with model.no_sync():
                    self.learn(model, images, labels)
                timer.end("compute")
                dist.barrier()
                timer.end("wait")
                flat = self.torch.cat([p.grad.flatten() for p in model.parameters()])
                dist.all_reduce(flat)
                timer.end("comm")
            optimizer.step()
            timer.end("compute")
        return timer.parts

    # --- modes

    def measure(self, mode: str) -> dict[str, Any]:
        """Measure one mode; the numbers are the medians of the epochs, means over the workers."""
        import torch.distributed as dist

        model, share, used = self.model(), 1, 1
        if mode == "dp":
            model, used = self.torch.nn.DataParallel(model), max(1, self.torch.cuda.device_count())
        elif mode == "ddp":
            share = used = self.world
            self._join()
            model = self.torch.nn.parallel.DistributedDataParallel(model)
        optimizer = self.torch.optim.SGD(model.parameters(), lr=0.01)
        steps = self.options.samples // self.options.batch
        self.plain_epoch(model, optimizer, share, min(steps, _WARM_UP_STEPS))
        self.taken_apart(model, optimizer, share, min(steps, _WARM_UP_STEPS))
        epochs, parts = [], []
        for _ in range(self.options.epochs):
            if share > 1:
                dist.barrier()
            epochs.append(self.plain_epoch(model, optimizer, share, steps))
            parts.append(self.taken_apart(model, optimizer, share, steps))
        own = {name: _median([p[name] for p in parts]) for name in parts[0]}
        everybody: list[Any] = [(own, epochs)]
        if share > 1:
            everybody = [None] * self.world
            dist.all_gather_object(everybody, (own, epochs))
        mean = {name: sum(p[name] for p, _ in everybody) / len(everybody) for name in own}
        slowest = _median([max(times) for times in zip(*(times for _, times in everybody))])
        return {"mode": mode, "workers": used, "epoch_s": slowest, "device": str(self.device.type), **_told(mode, mean)}

    def _join(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")


def _told(mode: str, parts: dict[str, float]) -> dict[str, Any]:
    """DataParallel scatters and gathers inside of the model's call: it cannot be told from computing."""
    return {**parts, "comm": None, "wait": None} if mode == "dp" else dict(parts)


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def main(words: Sequence[str] | None = None) -> None:
    """Measure each mode; rank 0 prints the results."""
    options = _arguments(words)
    try:
        import torch
    except ImportError:
        sys.exit(f"error: {sys.executable} has no torch; name one that has in `python:` of the cluster file")
    if options.batch % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"error: a batch of {options.batch} cannot be split over {os.environ['WORLD_SIZE']} workers")
    bench = _Bench(torch, options)
    for mode in options.modes.split(","):
        found = bench.measure(mode)
        if bench.rank == 0:
            print(MARK + json.dumps(found), flush=True)  # noqa: T201  (this is what the head reads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
