"""Finds losses and steps, or what a pattern names, in the output of a training program, for curves."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from clusterctl.logs.follow import LogFollower
from clusterctl.logs.log_line import LogLine, LogQuery, Skew
from clusterctl.logs.safe_text import strip_colours

_MAX_LINE = 2000
_MAX_NAMES = 4
"""The most losses of a line. A program that prints more losses has one for each layer or task."""
_MAX_SERIES_NAMES, _MAX_POINTS = 5, 400
MAX_LINES = 20_000
"""The most lines at the end of a rank's output in which values are searched."""

# `loss 3.21`, `'loss': 3.21` (Hugging Face), `lm loss: 3.2E+00` (Megatron), `val_loss=3.2`, `loss nan`.
_LOSS = re.compile(
    r"(?<![\w.])([A-Za-z_]{0,40}loss)[\"']?\s{0,4}[:=]?\s{0,4}([-+]?(?:\d{1,20}\.?\d{0,20}(?:[eE][-+]?\d{1,3})?|nan|inf)\b)",
    re.IGNORECASE,
)
# `step 24`, `global_step=24`, `iteration 24/ 500`, `iter 24: loss`.
_STEP = re.compile(
    r"(?<![A-Za-z.])(?:global_)?(?:step|iter(?:ation)?)[\"']?\s{0,8}[:=#]?\s{0,8}(\d{1,15})(?![\d.])", re.IGNORECASE
)


PATTERNS = {"loss": _LOSS.pattern, "step": _STEP.pattern}
"""The patterns of losses and steps, for people."""


def find_printed_values(line: str, pattern: re.Pattern[str] | None = None) -> dict[str, float]:
    """Return the losses of a line of output by their names, and its step as `step`; values that are finite alone.

    With a pattern, return the numbers of its named groups instead.
    """
    text = line[:_MAX_LINE]
    if pattern is not None:
        match = pattern.search(text)
        texts = [] if match is None else [(name, number) for name, number in match.groupdict().items() if number]
    else:
        step = _STEP.search(text)
        texts = [] if step is None else [("step", step[1])]
        texts += [(name.lower(), number) for name, number in _LOSS.findall(text)[:_MAX_NAMES]]
    found: dict[str, float] = {}
    for name, number in texts:
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value):
            found.setdefault(name, value)
    return found


class PrintedSeries:
    """The values that a rank has printed, over time: each a time on the head's wall clock, and a value.

    Args:
        run_dir: The run directory on the head.
        rank: The rank.
        skew: Clock offset of each node.
        pattern: See `find_printed_values`.
        max_lines: The most lines of the existing output that are read.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        rank: int,
        skew: Skew,
        pattern: re.Pattern[str] | None = None,
        max_lines: int = MAX_LINES,
    ) -> None:
        query = LogQuery(ranks=frozenset({rank}), tail=max_lines)
        self._pattern = pattern
        self._follower = LogFollower(run_dir, query, frame_interval=None, skew=skew)
        self._points: dict[str, _EvenPoints] = {}
        self._add(self._follower.history())

    def read(self) -> Mapping[str, Sequence[tuple[float, float]]]:
        """Return the values by name, also those of new lines."""
        self._add(self._follower.poll())
        return {name: points.list() for name, points in self._points.items()}

    def _add(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            for name, value in find_printed_values(strip_colours(line.text), self._pattern).items():
                if name in self._points or len(self._points) < _MAX_SERIES_NAMES:
                    self._points.setdefault(name, _EvenPoints()).add((line.time, value))


class _EvenPoints:
    """The last point, and a limited number of points that are evenly chosen among all points."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._count, self._every = 0, 1
        self._last = (0.0, 0.0)

    def add(self, point: tuple[float, float]) -> None:
        self._last = point
        if self._count % self._every == 0:
            self._points.append(point)
            if len(self._points) > _MAX_POINTS:
                del self._points[1::2]
                self._every *= 2
        self._count += 1

    def list(self) -> Sequence[tuple[float, float]]:
        return [*self._points, *([] if self._points[-1] == self._last else [self._last])]
