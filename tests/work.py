"""How much work something is: CPU seconds, to be compared with those for a larger input and never with a clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


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
