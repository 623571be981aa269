"""Counters of a worker's progress. A call is fast enough for every step, and never raises."""

from __future__ import annotations

from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
DEFAULT_LIMIT_S = 900.0
MAX_LIMIT_S = 1e9
"""A time limit that is longer than any run. This number replaces infinity, which JSON cannot represent."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class ProgressCounters:
    """The counters of one worker. The worker's threads write the counters; the thread of `StatusWriter` reads them.

    Attributes:
        beats: The number of signs of progress: a step, a batch, or a call of `progress`.
        progress_time: The monotonic time of the last sign of progress; `None` before the first sign.
        source: The source of `step`: `torch`, `keras` or `user`; `None` before the first step.
        degraded: The reason why a part of the shim does not work in this process, by part.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.progress_time: float | None = None
        self.source: str | None = None
        self.frameworks: list[str] = []
        self.degraded: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        self._steps: dict[str, int] = {}
        self._optimizers: dict[int, int] = {}
        self._phases: list[tuple[str, float, float]] = []

    @property
    def step(self) -> int | None:
        """The current step: the step that the user reports, else the Keras batch, else the optimizer step."""
        for source in ("user", "keras", "torch"):
            if source in self._steps:
                return self._steps[source]
        return None

    def count_progress(self) -> None:
        """Count a sign of progress that is not a step, such as a validation batch."""
        self.beats += 1
        self.progress_time = monotonic()

    def count_step(self, source: str) -> None:
        """Count one step, which `source` (`keras`) has reported."""
        self._steps[source] = self._steps.get(source, 0) + 1
        self.source = self.source or source
        self.count_progress()

    def count_optimizer_step(self, optimizer: object, _args: object, _kwargs: object) -> None:
        """Count a step of an optimizer; torch calls this hook. With several optimizers, the highest count is shown."""
        counts = self._optimizers
        if len(counts) > 256:  # The program creates optimizers again and again, so counting starts again.
            counts.clear()
        key = id(optimizer)
        counts[key] = steps = counts.get(key, 0) + 1
        if steps > self._steps.get("torch", 0):
            self._steps["torch"] = steps
        self.source = self.source or "torch"
        self.count_progress()

    def store_report(self, step: int | None, facts: dict[str, Any]) -> None:
        """Store a report of `clusterctl.progress`."""
        if step is not None:
            try:
                self._steps["user"] = int(step)
                self.source = "user"
            except (TypeError, ValueError, OverflowError):
                self.degraded["progress"] = "step is not a number"
        if facts:
            self.facts = facts
        self.count_progress()

    def begin_phase(self, name: str, limit: float | str) -> tuple[str, float, float]:
        """Begin a phase that the user or the shim has declared, and return the phase for `end_phase`."""
        seconds = parse_time_limit(limit)
        if seconds is None:
            self.degraded["phase"] = "the time limit is invalid, so it is 15m"
            seconds = DEFAULT_LIMIT_S
        entry = (str(name), monotonic(), seconds)
        self._phases.append(entry)
        return entry

    def end_phase(self, phase: tuple[str, float, float]) -> None:
        """End a phase that `begin_phase` has returned."""
        if phase in self._phases:
            self._phases.remove(phase)

    def get_longest_phase(self) -> tuple[str, float, float] | None:
        """Return the open phase with the latest time limit (name, start, limit in seconds), or `None`."""
        return max(list(self._phases), key=lambda entry: entry[1] + entry[2], default=None)


def parse_time_limit(limit: float | str) -> float | None:
    """Return the seconds of a limit such as `900`, `"900"`, `"90s"`, `"15m"` or `"1h30m"`; `None` for another text."""
    if isinstance(limit, (int, float)):
        return float(min(limit, MAX_LIMIT_S)) if limit > 0 else None
    total, digits = 0.0, ""
    for character in str(limit):
        if character in _UNITS and digits:
            total, digits = total + int(digits) * _UNITS[character], ""
        elif "0" <= character <= "9":
            digits += character
        else:
            return None
    return min(total + int(digits or "0"), MAX_LIMIT_S) or None
