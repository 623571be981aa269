"""Feeds the stall rule with the samples that arrive as replicated lines, and says what people should hear of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import duration_text
from clusterctl.run.rules.stalls.rule import (
    Stall,
    StallLimits,
    StallPhase,
    StallWatch,
    begin,
    judge,
    observe,
    observe_all,
    warning,
)
from clusterctl.validation import samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from clusterctl.agent.protocol.sample_types import ActivitySample
    from clusterctl.config.spec import StallSpec


# How long a rank must lag behind before that is said, in seconds.
STRAGGLES_FOR_S = 5.0
# What a node says after it was not heard for so long happened earlier than it arrives, in seconds.
LATE_S = 10.0


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
        self._new: list[tuple[ActivitySample, str, float]] = []
        self._heard: dict[str, tuple[float, float]] = {}
        self._late_at: float | None = None
        self._warned = False
        self._behind: dict[int, float] = {}
        self._told: frozenset[int] = frozenset()

    def replay(self, replicas: Mapping[str, Iterable[bytes]], now: float) -> None:
        """Take in what the nodes had said before this controller was there, as if the last of it had come just now.

        Args:
            replicas: Node to the lines of its replicated samples.
            now: The head's monotonic clock.
        """
        sampled = {node: list(self._of_attempt(lines)) for node, lines in replicas.items()}
        moments = [
            (now - (lines[-1]["m"] - sample["m"]), node, sample) for node, lines in sampled.items() for sample in lines
        ]
        if not moments:
            return
        moments.sort(key=lambda each: each[0])
        self._watch = begin(self._attempt, self._watch.expected, moments[0][0])
        for moment, node, sample in moments:
            self._watch = observe(self._watch, sample, node=node, attempt=self._attempt, now=moment)

    def feed(self, node: str, lines: Iterable[bytes], now: float) -> None:
        """Take in lines of a node's samples."""
        for sample in self._of_attempt(lines):
            if node in self._heard and now - self._heard[node][1] > LATE_S:
                self._late_at = now
            self._heard[node] = (self._heard.get(node, (now, now))[0], now)
            self._new.append((sample, node, now))

    def _take_in(self) -> None:
        """Fold what has come since the last look."""
        if self._new:
            new, self._new = self._new, []
            self._watch = observe_all(self._watch, new, attempt=self._attempt)

    def _of_attempt(self, lines: Iterable[bytes]) -> Iterator[ActivitySample]:
        yield from (
            s
            for s in samples.parse_samples(lines, "activity", "m", "ranks", "attempt")
            if s["attempt"] == self._attempt
        )

    def judge(self, now: float) -> Stall:
        """Return what the rule says now."""
        self._take_in()
        self._watch, stall = judge(self._watch, self._limits, now)
        return stall

    def news(self, stall: Stall, now: float) -> list[str]:
        """Return the warnings that were not said before: a limit that comes too late, ranks that fall behind."""
        warnings: list[str] = []
        warned = None if self._warned else warning(self._watch, self._limits)
        if warned is not None:
            self._warned = True
            warnings.append(warned)
        if self._late_at is not None and now - self._late_at < stall.limit_s:
            # Steps that arrive late make the others look as if they had not moved since.
            self._behind = {}
        elif stall.phase is StallPhase.NONE and stall.known:
            # The ranks of a run that moves again are not all heard of at the same moment.
            self._behind = {rank: self._behind.get(rank, now) for rank in stall.stragglers}
            late = frozenset(rank for rank, since in self._behind.items() if now - since >= STRAGGLES_FOR_S)
            new, self._told = late - self._told, late
            warnings += [
                f"straggler: rank {rank} on {self._watch.ranks[rank].node} has made no progress"
                f" for over {duration_text(stall.limit_s)} while others do"
                for rank in sorted(new)
            ]
        return warnings

    def idle(self, nodes: Iterable[str]) -> float:
        """Return for how many seconds these nodes have said that nothing moves: no output, no CPU, no progress.

        A node that says nothing is not one where nothing moves: time alone makes nobody idle, nor does a single look.
        """
        self._take_in()
        moved = [m for m in (self._watch.activity_at, self._watch.progress_at) if m is not None]
        spans = [self._heard.get(node, (0.0, 0.0)) for node in nodes]
        newest = min((last for _, last in spans), default=0.0)
        return max(0.0, newest - max([*moved, *(first for first, _ in spans)], default=newest))
