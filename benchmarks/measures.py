"""What a measurement says, and how samples become one number."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One number with what it is held against.

    Attributes:
        name: What was measured, in a few words.
        value: The number.
        unit: Its unit; `x` for a ratio to a peer measured in the same run.
        goal: The largest value that is good enough (the smallest, with `at_least`); None: reported only.
        at_least: The goal is a lower bound.
        detail: The raw numbers behind it, for a person.
    """

    name: str
    value: float
    unit: str = "x"
    goal: float | None = None
    at_least: bool = False
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def as_json(self) -> dict[str, object]:
        """Return the measure for `--json`."""
        return asdict(self) | {"met": self.met}


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def alternate(rounds: int, **actions: Callable[[], object]) -> dict[str, list[float]]:
    """Time several actions turn by turn, so that a busy moment of the machine meets all of them alike."""
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            samples[name].append(timed(action))
    return samples


def percentile(samples: Iterable[float], share: float) -> float:
    """Return the nearest-rank percentile of samples; `share` lies between 0 and 1."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def spread(samples: Sequence[float]) -> str:
    """Return `median (least to most)` in seconds."""
    return f"{statistics.median(samples):.3f} s ({min(samples):.3f} to {max(samples):.3f}, n={len(samples)})"
