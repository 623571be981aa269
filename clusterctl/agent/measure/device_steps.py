"""What one device does: test its memory, multiply matrices, copy. The same code for a GPU, and for the CPU in small."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_GPU_SIZE, _CPU_SIZE = 8192, 384
_GPU_COPY_BYTES, _CPU_COPY_BYTES = 1 << 30, 32 << 20
_CPU_TEST_BYTES = 32 << 20
_CHUNK_WORDS = 1 << 22
MIN_CPU_S = 0.1
"""The CPU seconds in which a CPU shows its speed."""
_PATTERNS = (0x5555555555555555, -0x5555555555555556, 0)
"""Words that are written to memory: alternating bits, their complement, and each word its own address."""


@dataclass(frozen=True)
class Task:
    """Work that is repeated.

    Attributes:
        work: Queues the work once.
        amount: What one repetition does, in floating-point operations or bytes.
        result: The memory that receives the result.
    """

    work: Callable[[], Any]
    amount: float
    result: torch.Tensor


class Device:
    """The device of this rank: a GPU that torch knows as `cuda` (AMD's too), or the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.dtypes = ("float32", "bfloat16", "float16") if self.is_gpu else ("float32", "bfloat16")
        self.copies = ("memory", "to_device", "from_device") if self.is_gpu else ("memory",)

    @classmethod
    def open(cls) -> Device:
        """Return the device of this rank, with a context in which a first sum was right."""
        if not torch.cuda.is_available():
            return cls(torch.device("cpu"))
        index = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", index if index < torch.cuda.device_count() else 0)
        torch.cuda.set_device(device)
        if int(torch.ones(1024, device=device).sum()) != 1024:
            raise RuntimeError("the sum of 1024 ones is not 1024")
        return cls(device)

    def describe(self) -> dict[str, Any]:
        """Return the properties of the device, for the line `context`."""
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}
        known = {name: version for name, version in versions.items() if version}
        if self.is_gpu:
            found = torch.cuda.get_device_properties(self.device)
            parts = [found.name, f"{found.multi_processor_count} processors", *known.values()]
            uuid = getattr(found, "uuid", None)
            model, memory = found.name, found.total_memory
        else:
            capability, uuid = torch.backends.cpu.get_cpu_capability(), None
            model, memory = _read_cpu_model(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            parts = [model, capability, *known.values()]
        return {
            "device": self.device.type,
            "model": model,
            "kind": " · ".join(parts),
            "uuid": None if uuid is None else f"GPU-{uuid}",
            "memory_bytes": memory,
            "versions": known,
        }

    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def test_memory(self, share: float) -> dict[str, Any]:
        """Write patterns to a share of the free memory, and read them again; return the fields of the line `memory`."""
        free = torch.cuda.mem_get_info(self.device)[0] if self.is_gpu else _CPU_TEST_BYTES / share
        words = max(1, int(free * share / 8 / _CHUNK_WORDS)) * _CHUNK_WORDS
        memory = torch.empty(words, dtype=torch.int64, device=self.device)
        address = torch.arange(_CHUNK_WORDS, dtype=torch.int64, device=self.device)
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for pattern in _PATTERNS:
            chunks = memory.view(-1, _CHUNK_WORDS)
            for number, chunk in enumerate(chunks):
                chunk.copy_(address + number * _CHUNK_WORDS if pattern == 0 else address.new_full((), pattern))
            for number, chunk in enumerate(chunks):
                expected = address + number * _CHUNK_WORDS if pattern == 0 else address.new_full((), pattern)
                wrong += (chunk != expected).sum()
        return {"tested_bytes": words * 8, "wrong": int(wrong)}

    def prepare_gemm(self, dtype: str) -> Task:
        """Return the multiplication of two matrices whose values integer arithmetic gives, equal on all devices."""
        size = _GPU_SIZE if self.is_gpu else _CPU_SIZE
        numbers = torch.arange(size * size, dtype=torch.int64, device=self.device)
        left, right = (
            # The products and sums of these fractions are not exact, so that an order of sums or a wrong bit shows.
            (((numbers * factor + 12345) >> 8) % 65521 - 32760).to(torch.float32).div_(32768).view(size, size)
            for factor in (1103515245, 22695477)
        )
        a, b = left.to(getattr(torch, dtype)), right.to(getattr(torch, dtype))
        result = torch.empty_like(a)
        return Task(lambda: torch.mm(a, b, out=result), 2.0 * size**3, result)

    def repeat_gemm(self, task: Task, repeats: int) -> dict[str, Any]:
        """Multiply several times; return the digest of the first result, and the number of results with other bits."""
        digests = []
        for _ in range(repeats):
            task.result.zero_()
            task.work()
            digests.append(_digest(task.result))
        return {"digest": digests[0], "repeats": repeats, "wrong": repeats - digests.count(digests[0])}

    def prepare_copy(self, what: str) -> Task:
        """Return a copy within the memory of the device, to it, or from it."""
        if what == "memory":
            size = _GPU_COPY_BYTES if self.is_gpu else _CPU_COPY_BYTES
            source, target = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
            return Task(lambda: target.copy_(source), 2.0 * size, target)
        size = _GPU_COPY_BYTES // 4
        inside = torch.zeros(size, dtype=torch.uint8, device=self.device)
        outside = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        source, target = (outside, inside) if what == "to_device" else (inside, outside)
        return Task(lambda: target.copy_(source, non_blocking=True), float(size), target)

    def measure_rate(self, task: Task, seconds: float) -> tuple[float, float]:
        """Repeat a task for some seconds of wall time; return its amount per second, and the CPU seconds that it took.

        A CPU that has other work gives this process few and short turns. Then the window is longer, up to 20 times.
        """
        task.work()
        self.synchronize()
        began, cpu, count, batch = time.perf_counter(), time.process_time(), 0, 1
        while True:
            for _ in range(batch):
                task.work()
            self.synchronize()
            count += batch
            elapsed, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            if elapsed >= seconds and (self.is_gpu or cpu_s >= MIN_CPU_S or elapsed >= 20 * seconds):
                return count * task.amount / elapsed, cpu_s
            # Long enough that the wait for the device does not count, short enough that the window is met.
            batch = max(1, min(batch * 2, int(count * seconds / 10 / elapsed)))


def _digest(result: torch.Tensor) -> str:
    """Return a number that changes with any bit of a matrix. It is computed on the device, by integers."""
    bits = result.view(torch.int32 if result.element_size() == 4 else torch.int16)
    rows = bits.sum(dim=1, dtype=torch.int64)
    columns = bits.sum(dim=0, dtype=torch.int64)
    weights = torch.arange(1, rows.numel() * 2, 2, dtype=torch.int64, device=result.device)
    return f"{int((rows * weights).sum()) & (1 << 64) - 1:016x}{int((columns * weights).sum()) & (1 << 64) - 1:016x}"


def _read_cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
