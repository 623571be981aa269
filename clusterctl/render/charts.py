"""Computes the coordinates of charts over time for a page: curves, bars and axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from markupsafe import Markup

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, RIGHT = 880.0, 150.0, 48.0, 8.0
TONES = {"good": "#1a7f37", "bad": "#cf222e", "warn": "#9a6700", "dim": "#888"}
_TOP, _BOTTOM = 8.0, 20.0
_COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#1b7c83", "#bc4c00")
MAX_CURVES = 16
"""The largest number of curves in a chart. With more curves, the chart shows lowest, median and highest value."""
_MIN_FOR_MEDIAN = 3
_MAX_DISTANCE = 0.03
"""The mean distance from the median above which a curve is drawn separately, as a share of the highest value."""
_BINS = 120


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The period of wall clock time that a chart shows, and its conversion to x coordinates."""

    begin: float
    end: float

    def x_at(self, time: float) -> float:
        """Return the x coordinate of a time; times outside of the axis are moved to its ends."""
        share = (time - self.begin) / max(self.end - self.begin, 1e-9)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)

    def time_labels(self) -> list[tuple[float, str, str]]:
        """Return x coordinate, SVG text anchor and text of each label below a chart."""
        form = "%m-%d %H:%M" if self.end - self.begin > 86400 else "%H:%M:%S"
        times = ((self.begin, "start"), ((self.begin + self.end) / 2, "middle"), (self.end, "end"))
        return [
            (self.x_at(time), anchor, f"{datetime.fromtimestamp(time).astimezone():{form}}") for time, anchor in times
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The bar of an attempt. `tone` is a CSS class of the page."""

    x: float
    width: float
    label: str
    tone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """An event with its time; `tone` is a CSS class of the page."""

    time: float
    label: str
    tone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line of a chart; `path` is the `points` attribute of an SVG polyline."""

    name: str
    colour: str
    path: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over time; `grid_lines` are the y coordinates and labels of the horizontal lines."""

    title: str
    curves: Sequence[Curve]
    grid_lines: Sequence[tuple[float, str]]


def make_chart(title: str, unit: str, series: Mapping[str, Points], axis: TimeAxis) -> Chart | None:
    """Return a chart of the values over time; `None` if there is no value to draw."""
    shown = select_curves({name: filter_drawable_points(points) for name, points in series.items()}, axis)
    if not shown:
        return None
    top = ceiling(max(value for points in shown.values() for _, value in points))
    curves = [
        Curve(name=name, colour=_COLOURS[index % len(_COLOURS)], path=_path(points, top, axis))
        for index, (name, points) in enumerate(shown.items())
    ]
    grid_lines = [(_y(share * top, top), f"{share * top:g}") for share in (0.0, 0.5, 1.0)]
    return Chart(title=f"{title}, {unit}" if unit else title, curves=curves, grid_lines=grid_lines)


def filter_drawable_points(points: Points) -> Points:
    """Return the points with a finite time and a finite value that is not negative."""
    return [point for point in points if -math.inf < point[0] < math.inf and 0.0 <= point[1] < math.inf]


def select_curves(series: Mapping[str, Points], axis: TimeAxis) -> dict[str, Points]:
    """Return a few curves that a reader can tell apart.

    If most curves agree, return the median of all curves, and the curves that differ from the median. If there are too
    many curves, return the lowest, the median and the highest value at each time. In all other cases, return all
    curves.
    """
    known = {name: points for name, points in series.items() if points}
    if len(known) < _MIN_FOR_MEDIAN:
        return known
    bins: list[dict[str, list[float]]] = [{} for _ in range(_BINS + 1)]
    begin, width = axis.begin, max((axis.end - axis.begin) / _BINS, 1e-9)
    last = begin + _BINS * width
    for name, points in known.items():
        for time, value in points:
            place = 0 if time <= begin else _BINS if time >= last else int((time - begin) / width)
            bins[place].setdefault(name, []).append(value)
    full = [(begin + (place + 0.5) * width, values) for place, values in enumerate(bins) if values]
    drawn = {
        pick: [(time, choose([value for own in values.values() for value in own])) for time, values in full]
        for pick, choose in (("lowest", min), ("median", median), ("highest", max))
    }
    if len(known) > MAX_CURVES:
        return {f"{pick} of {len(known)}": points for pick, points in drawn.items()}
    unlike = _unlike([values for _, values in full], known)
    if 2 * len(unlike) >= len(known):
        return known
    return {f"median of {len(known)}": drawn["median"], **{name: known[name] for name in unlike}}


def _unlike(bins: Sequence[Mapping[str, Sequence[float]]], names: Iterable[str]) -> list[str]:
    """Return the names of the curves whose mean distance from the median is large."""
    top = max((value for values in bins for own in values.values() for value in own), default=0.0)
    away: dict[str, list[float]] = {name: [] for name in names}
    for values in bins:
        own = {name: sum(each) / len(each) for name, each in values.items()}
        middle = median(own.values())
        for name, value in own.items():
            away[name].append(abs(value - middle))
    return [name for name, each in away.items() if each and sum(each) / len(each) > _MAX_DISTANCE * top]


def _path(points: Points, top: float, axis: TimeAxis) -> Markup:
    return Markup(
        " ".join(f"{format_coordinate(axis.x_at(time))},{format_coordinate(_y(value, top))}" for time, value in points)
    )


def _y(value: float, top: float) -> float:
    return _TOP + (1.0 - min(1.0, value / top)) * (HEIGHT - _TOP - _BOTTOM)


def ceiling(value: float) -> float:
    """Return the highest number of a y axis, which is 1, 2 or 5 times a power of ten."""
    if value <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0, 20.0) if factor * power >= value)


def format_coordinate(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
