"""Counters of a worker's progress. A call is cheap enough for every step, and never raises."""

from __future__ import annotations

from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
DEFAULT_LIMIT_S = 900.0
LONGEST_LIMIT_S = 1e9
"""Longer than any run: JSON has no number for infinity."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class ProgressCounters:
    """Counters of one worker. Writers are the worker's own threads, the reader is the beat.

    Attributes:
        beats: Rises with every sign of progress: a step, a batch, a call of `progress`.
        progress_time: Monotonic time of the last sign of progress; `None` before the first.
        source: Where `step` comes from: `torch`, `keras`, `user`; `None` before the first.
        degraded: Why a part does not work here, by part.
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
        """The step to show: the user's own first, then Keras batches, then optimizer steps."""
        for source in ("user", "keras", "torch"):
            if source in self._steps:
                return self._steps[source]
        return None

    def count_progress(self) -> None:
        """Count a sign of progress that is no step, such as a validation batch."""
        self.beats += 1
        self.progress_time = monotonic()

    def count_step(self, source: str) -> None:
        """Count one step of `source`."""
        self._steps[source] = self._steps.get(source, 0) + 1
        self.source = self.source or source
        self.count_progress()

    def count_optimizer_step(self, optimizer: object, _args: object, _kwargs: object) -> None:
        """Count a step of an optimizer, as its post-step hook. Of several optimizers the busiest one counts."""
        counts = self._optimizers
        if len(counts) > 256:  # optimizers made anew all the time; the shown step then starts over
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
        """Begin a declared phase; return the entry for `end_phase`."""
        seconds = parse_limit(limit)
        if seconds is None:
            self.degraded["phase"] = "cannot read its limit, taking 15m"
            seconds = DEFAULT_LIMIT_S
        entry = (str(name), monotonic(), seconds)
        self._phases.append(entry)
        return entry

    def end_phase(self, entry: tuple[str, float, float]) -> None:
        """End a declared phase."""
        if entry in self._phases:
            self._phases.remove(entry)

    def get_longest_phase(self) -> tuple[str, float, float] | None:
        """Return name, begin and limit of the open phase that may last longest, or `None`."""
        return max(list(self._phases), key=lambda entry: entry[1] + entry[2], default=None)


def parse_limit(limit: float | str) -> float | None:
    """Return the seconds of `900`, `"900"`, `"90s"`, `"15m"` or `"1h30m"`; `None` for anything else."""
    if isinstance(limit, (int, float)):
        return float(min(limit, LONGEST_LIMIT_S)) if limit > 0 else None
    total, digits = 0.0, ""
    for character in str(limit):
        if character in _UNITS and digits:
            total, digits = total + int(digits) * _UNITS[character], ""
        elif "0" <= character <= "9":
            digits += character
        else:
            return None
    return min(total + int(digits or "0"), LONGEST_LIMIT_S) or None
