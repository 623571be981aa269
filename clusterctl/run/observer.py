"""Feeds the stall rule with the samples that arrive as replicated lines."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from clusterctl.run.stall import Stall, StallLimits, StallWatch, begin, judge, observe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.config.spec import StallSpec


class StallObserver:
    """Watches one attempt; made anew for each, so that nothing of an earlier one is kept.

    Args:
        attempt: Its number.
        ranks: Its ranks.
        spec: What the user set.
        now: When its workers were started, on the head's monotonic clock.
    """

    def __init__(self, attempt: int, ranks: Iterable[int], spec: StallSpec, now: float) -> None:
        self._attempt = attempt
        self._limits = StallLimits(timeout=spec.timeout, startup_timeout=spec.startup_timeout)
        self._watch: StallWatch = begin(attempt, ranks, now)
        self._rest: dict[str, bytes] = {}

    def feed(self, node: str, payload: bytes, now: float) -> None:
        """Take in bytes of a node's samples; a torn last line waits for its end."""
        lines = (self._rest.get(node, b"") + payload).split(b"\n")
        self._rest[node] = lines.pop()
        for line in lines:
            with contextlib.suppress(ValueError):
                sample = json.loads(line)
                if sample.get("kind") == "activity" and sample.get("attempt") == self._attempt:
                    self._watch = observe(self._watch, sample, node=node, attempt=self._attempt, now=now)

    def judge(self, now: float) -> Stall:
        """Return what the rule says now."""
        self._watch, stall = judge(self._watch, self._limits, now)
        return stall

    def idle(self, now: float) -> float:
        """Return seconds since anything was seen to move: output, CPU or progress."""
        moved = [m for m in (self._watch.activity_at, self._watch.progress_at) if m is not None]
        return now - max(moved, default=self._watch.begun)
