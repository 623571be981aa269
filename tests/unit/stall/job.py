"""A job as the rule sees it: samples made from what each rank does at each moment, without any process."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterctl.agent.supervisor.sampling import SampleThinning
from clusterctl.config.spec import StallSpec
from clusterctl.run.rules import stall_detection

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLE_S = 2.0


@dataclass
class Rank:
    """One rank, described by functions of time (seconds since the start of the attempt)."""

    step: Callable[[float], int] | None = None
    output: Callable[[float], int] = lambda t: 0
    written: Callable[[float], int] = lambda t: 0
    cpu: Callable[[float], float] = lambda t: 0.0
    starved: Callable[[float], float] | None = None
    main_age: Callable[[float], float] = lambda t: t
    wchan: Callable[[float], str | None] = lambda t: None
    phase: Callable[[float], tuple[str, float, float] | None] = lambda t: None
    alive: Callable[[float], bool] = lambda t: True
    frameworks: tuple[str, ...] = ("torch",)
    backend: str | None = "gloo"
    timeout_s: float | None = None
    injected: bool = True
    unseen: Callable[[float], bool] = lambda t: False
    seq: Callable[[float], tuple[int, int] | None] = lambda t: None
    printed: Callable[[float], tuple[int, float] | None] = lambda t: None
    node: str = "a"

    def sample(self, t: float) -> dict[str, Any]:
        return {
            "alive": self.alive(t),
            "output": self.output(t),
            "printed_steps": self.printed(t),
            "read": 0,
            "written": self.written(t),
            "cpu_s": self.cpu(t),
            "starved_s": self.starved(t) if self.starved else None,
            "wchan": self.wchan(t),
            "inside": self.inside(t) if self.injected else None,
        }

    def inside(self, t: float) -> dict[str, Any]:
        steps = self.step(t) if self.step else 0
        phase = self.phase(t)
        return {
            "pid": 7,
            "beats": steps,
            "seq": {} if (seq := self.seq(t)) is None else {"0": seq},
            "age_s": 0.5,
            "progress_age_s": t - self._last(t, steps) if steps else None,
            "main_age_s": self.main_age(t),
            "phase": phase and {"name": phase[0], "age_s": t - phase[1], "limit_s": phase[2]},
            "frameworks": list(self.frameworks),
            "backend": self.backend,
            "timeout_s": self.timeout_s,
            "unseen": self.unseen(t),
        }

    def _last(self, t: float, steps: int) -> float:
        """When the last step was made, to a millisecond."""
        low, high = 0.0, t
        while high - low > 0.001:
            middle = (low + high) / 2
            low, high = (low, middle) if self.step and self.step(middle) >= steps else (middle, high)
        return high


@dataclass
class Seen:
    """What the rule said over time."""

    suspected: float | None = None
    confirmed: float | None = None
    last: stall_detection.StallJudgement = field(default_factory=stall_detection.StallJudgement)
    all: list[tuple[float, stall_detection.StallJudgement]] = field(default_factory=list)


def watch(
    ranks: dict[int, Rank],
    until: float,
    limits: StallSpec | None = None,
    *,
    gpus: bool = False,
    seen: Callable[[str, float], bool] = lambda node, t: True,
    watched: Callable[[float], dict[str, list[int]]] = lambda t: {},
) -> Seen:
    """Runs the rule over a job: one look of each node every two seconds, of which arrives what a node writes down.

    Samples are taken in one by one, and all of two seconds at once: the rule says the same.
    """
    limits = limits or StallSpec()
    steadiness: dict[str, SampleThinning] = defaultdict(SampleThinning)
    state, said, t = stall_detection.start_stall_watch(0, ranks, 1000.0), Seen(), 0.0
    together = state
    while t < until:
        t += SAMPLE_S
        arrived = []
        for node in sorted({rank.node for rank in ranks.values()}):
            if seen(node, t):
                members = {str(r): rank.sample(t) for r, rank in ranks.items() if rank.node == node}
                sample = {"m": 50.0 + t, "gpus": gpus, "watched": watched(t), "ranks": members}
                if not steadiness[node].should_skip(sample):
                    state = stall_detection.add_sample(state, sample, node=node, attempt=0, now=1000.0 + t)
                    arrived.append((sample, node, 1000.0 + t))
        state, said.last = stall_detection.judge_stall(state, limits, 1000.0 + t)
        together, same = stall_detection.judge_stall(
            stall_detection.add_samples(together, arrived, attempt=0), limits, 1000.0 + t
        )
        assert same == said.last
        said.all.append((t, said.last))
        if said.last.phase is not stall_detection.StallPhase.NONE and said.suspected is None:
            said.suspected = t
        if said.last.phase is stall_detection.StallPhase.CONFIRMED and said.confirmed is None:
            said.confirmed = t
    return said


def steps(period: float, freeze: float = 1e9, first: float = 10.0) -> Callable[[float], int]:
    """A step every `period` seconds from `first` on, until the freeze."""
    return lambda t: max(0, int((min(t, freeze) - first) / period))


def busy(until: float = 1e9, share: float = 0.9) -> Callable[[float], float]:
    return lambda t: min(t, until) * share
