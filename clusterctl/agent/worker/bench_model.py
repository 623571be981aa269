"""The built-in model of `clusterctl bench`: a small convnet that measures where its own time goes.

Every worker runs `python -m clusterctl.agent.worker.bench_model`. Rank 0 prints a line for each mode: `MARK` and JSON.
The data set and the global batch are the same for any number of workers (strong scaling), so an epoch is the same work
everywhere. The module imports torch when it runs, never when it is imported.
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


def _parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The built-in model of clusterctl bench.")
    parser.add_argument("--modes", default="ddp", help="of single, dp, ddp, separated by commas")
    parser.add_argument("--epochs", type=int, default=3, help="measured ones; their median counts")
    parser.add_argument("--samples", type=int, default=1024, help="images of an epoch")
    parser.add_argument("--batch", type=int, default=256, help="images of a step, over all workers")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this machine that DataParallel may use")
    parser.add_argument(
        "--max-workers", type=int, default=1, help="workers that ever share this machine, and so its cores"
    )
    return parser.parse_args(words)


class _Timer:
    """The seconds of the parts of an epoch; each part ends when the device has finished it."""

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


class _Benchmark:
    """The model, data and clock of one worker."""

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
            # A single worker gets as many threads as one of many; otherwise it would have all cores to itself.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.max_workers))
        generator = torch.Generator().manual_seed(0)
        count = options.samples
        self.images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(0, 10, (count,), generator=generator)

    # --- parts of a step

    def settle(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def batch(self, step: int, share: int) -> tuple[Any, Any]:
        """Make this worker's share of a batch: a flip, a shift, and values around zero, as image pipelines do."""
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
        """Train as a script does; return the seconds of this worker."""
        self.settle()
        began = time.perf_counter()
        for step in range(steps):
            optimizer.zero_grad()
            self.learn(model, *self.batch(step, share))
            optimizer.step()
        self.settle()
        return time.perf_counter() - began

    def taken_apart(self, model: Any, optimizer: Any, share: int, steps: int) -> dict[str, float]:
        """Train with the parts one after the other; `comm` is the exchange alone, after all workers have arrived."""
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

    def measure(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Measure the modes in turn, so that a disturbance of the machine affects all of them.

        The numbers are medians over the epochs. The parts are means over the workers; an epoch is that of the slowest.
        """
        modes = [self._mode(name) for name in names]
        steps = self.options.samples // self.options.batch
        for number in range(self.options.epochs + 1):
            for mode in modes:
                mode.run(self, steps if number else min(steps, _WARM_UP_STEPS), is_measured=number > 0)
        return [mode.result(self) for mode in modes]

    def _mode(self, name: str) -> _TrainingMode:
        model, share, used = self.model(), 1, 1
        if name == "dp":
            used = max(1, min(self.options.gpus, self.torch.cuda.device_count()))
            model = self.torch.nn.DataParallel(
                model, device_ids=list(range(used)) if self.device.type == "cuda" else None
            )
        elif name == "ddp":
            share = used = self.world
            self._join()
            model = self.torch.nn.parallel.DistributedDataParallel(model)
        return _TrainingMode(name, model, self.torch.optim.SGD(model.parameters(), lr=0.01), share, used)

    def _join(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")


class _TrainingMode:
    """One way to train, and its measurements."""

    def __init__(self, name: str, model: Any, optimizer: Any, share: int, used: int) -> None:
        self.name, self.model, self.optimizer, self.share, self.used = name, model, optimizer, share, used
        self.epochs: list[float] = []
        self.parts: list[dict[str, float]] = []

    def run(self, bench: _Benchmark, steps: int, *, is_measured: bool) -> None:
        """Train one epoch as a script does, then one in parts."""
        if self.share > 1:
            import torch.distributed as dist

            dist.barrier()
        epoch = bench.plain_epoch(self.model, self.optimizer, self.share, steps)
        parts = bench.taken_apart(self.model, self.optimizer, self.share, steps)
        if is_measured:
            self.epochs.append(epoch)
            self.parts.append(parts)

    def result(self, bench: _Benchmark) -> dict[str, Any]:
        """Return the line of rank 0 as an object."""
        own = {name: _median([p[name] for p in self.parts]) for name in self.parts[0]}
        everybody: list[Any] = [(own, self.epochs)]
        if self.share > 1:
            import torch.distributed as dist

            everybody = [None] * bench.world
            dist.all_gather_object(everybody, (own, self.epochs))
        mean: dict[str, float | None] = {n: sum(p[n] for p, _ in everybody) / len(everybody) for n in own}
        if self.name == "dp":
            # DataParallel exchanges inside the model's call, so exchange and computing cannot be separated.
            mean |= {"comm": None, "wait": None}
        slowest = _median([max(times) for times in zip(*(times for _, times in everybody))])
        return {"mode": self.name, "workers": self.used, "epoch_s": slowest, "device": bench.device.type, **mean}


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def main(words: Sequence[str] | None = None) -> None:
    """Measure each mode; rank 0 prints the results."""
    options = _parse_arguments(words)
    try:
        import torch
    except ImportError:
        sys.exit(f"error: {sys.executable} has no torch; name one that has in `python:` of the cluster file")
    if options.batch % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"error: a batch of {options.batch} cannot be split over {os.environ['WORLD_SIZE']} workers")
    bench = _Benchmark(torch, options)
    for measured in bench.measure(options.modes.split(",")):
        if bench.rank == 0:
            print(MARK + json.dumps(measured), flush=True)  # noqa: T201  (this is what the head reads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
