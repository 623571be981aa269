"""How much work something is: CPU seconds or calls, to be compared with those for a larger input, never with a clock."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import FrameType


def work(action: Callable[[], object], rounds: int = 5) -> float:
    """Return the CPU seconds of the round that was disturbed least; collecting garbage counts for nothing."""
    best = float("inf")
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            begun = time.thread_time()
            action()
            best = min(best, time.thread_time() - begun)
    finally:
        gc.enable()
    return best


def calls(action: Callable[[], object]) -> int:
    """Return how many functions an action calls, those in C among them: the same number each time, on any machine."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count
