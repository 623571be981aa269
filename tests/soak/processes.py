"""What processes hold and use: memory, descriptors, time of the processor."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

_TICKS = os.sysconf("SC_CLK_TCK")


def _about(pid: int, what: str) -> str:
    """Return what the kernel says of a process, nothing of one that has just ended."""
    try:
        return Path(f"/proc/{pid}/{what}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def family(pid: int) -> list[int]:
    """Return a process and all below it, but not those that it executed something else in."""
    program, below = os.readlink(f"/proc/{pid}/exe"), [pid]
    for parent in below:
        for child in _about(parent, f"task/{parent}/children").split():
            try:
                if os.readlink(f"/proc/{child}/exe") == program:
                    below.append(int(child))
            except OSError:
                continue
    return below


def children(pid: int) -> list[int]:
    """Return the processes that a process, whichever of its threads, has started and not seen the end of."""
    threads = os.listdir(f"/proc/{pid}/task")
    return [int(child) for thread in threads for child in _about(pid, f"task/{thread}/children").split()]


def cpu_seconds(pids: list[int]) -> float:
    """Return the seconds that processes have used, those included that their ended children had."""
    fields = [_about(pid, "stat").rpartition(")")[2].split() for pid in pids]
    return sum(int(value) for each in fields for value in each[11:15]) / _TICKS


def peak_mb(pid: int) -> float:
    """Return the most memory that a process has held at once."""
    lines = _about(pid, "status").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def shared_out_mb(pids: list[int]) -> float:
    """Return the memory that processes hold, where what several share is divided among them.

    Without the pages of programs and libraries, where the kernel tells them apart (5.9): the share of these is larger
    once others that run the same have ended.
    """
    found = 0
    for pid in pids:
        # One that has just ended holds nothing, and says nothing.
        fields = dict(line.split()[:2] for line in _about(pid, "smaps_rollup").splitlines()[1:])
        own = [fields[name] for name in ("Pss_Anon:", "Pss_Shmem:") if name in fields] or [fields.get("Pss:", 0)]
        found += sum(map(int, own))
    return found / 1024


def lasting_memory_mb(pid: int) -> float:
    """Return what a process and all below it hold: the median of the looks that found the fewest processes.

    A helper that lives for a moment adds what it writes to. If it begins or ends between two reads of one look, its
    part of what it shares with the others is missing.
    """
    looks: list[tuple[int, float]] = []
    for _ in range(40):
        pids = family(pid)
        looks.append((len(pids), shared_out_mb(pids)))
        time.sleep(0.05)
    fewest = min(count for count, _ in looks)
    return statistics.median(megabytes for count, megabytes in looks if count == fewest)


def descriptors(pid: int) -> int:
    """Return how many descriptors a process has open at one moment."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def lasting_descriptors(pid: int) -> int:
    """Return how many descriptors a process keeps open: the fewest of many looks, as some are open for a moment only."""
    looks = []
    for _ in range(50):
        looks.append(descriptors(pid))
        time.sleep(0.02)
    return min(looks)


def alone(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a call gives in a new process, whose memory and descriptors are those of nobody else."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args, **kwargs).result()
