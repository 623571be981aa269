"""Curves and bars as SVG: a pure function of their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from clusterctl.render.html import Html, element, joined

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 880.0, 150.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, 8.0, 8.0, 20.0
_COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#1b7c83", "#bc4c00")
MOST_LINES = 16
"""Curves in one picture; of more the lowest, the middle and the highest are shown."""
_ALIKE_FROM = 3
_APART = 0.03
"""A curve that is further from the middle, as a share of the highest value, can be told from it."""
_BINS = 120


@dataclass(frozen=True, slots=True)
class Span:
    """The time that a picture shows; wall clock."""

    begin: float
    end: float

    def x(self, time: float) -> float:
        """Return where a time stands, from left to right."""
        share = (time - self.begin) / max(self.end - self.begin, 1e-9)
        return _LEFT + min(1.0, max(0.0, share)) * (_WIDTH - _LEFT - _RIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that took a time: an attempt. `tone` is a class of the page's style."""

    begin: float
    end: float
    label: str
    tone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Something that happened."""

    time: float
    label: str
    tone: str


_TONES = {"good": "#1a7f37", "bad": "#cf222e", "warn": "#9a6700", "dim": "#888"}


def chart(title: str, unit: str, series: Mapping[str, Points], span: Span) -> Html:
    """Return a picture of curves over time, with its title and names; nothing where there is no curve."""
    shown = few({name: finite(points) for name, points in series.items()}, span)
    if not shown:
        return Html()
    top = _ceiling(max(value for points in shown.values() for _, value in points))
    lines = [
        element("polyline", points=_path(points, top, span), fill="none", stroke=colour, stroke_width=1.5)
        for (_, points), colour in zip(shown.items(), _colours(len(shown)), strict=True)
    ]
    names = [
        element("span", element("span", "■ ", style=f"color:{colour}"), name, class_="key")
        for name, colour in zip(shown, _colours(len(shown)), strict=True)
    ]
    title = f"{title}, {unit}" if unit else title
    picture = _picture(_HEIGHT, _axes(top, span), *lines, label=title)
    return element("figure", element("figcaption", title), picture, joined(names))


def finite(points: Points) -> Points:
    """Return the points that can be drawn."""
    return [point for point in points if -math.inf < point[0] < math.inf and 0.0 <= point[1] < math.inf]


def few(series: Mapping[str, Points], span: Span) -> dict[str, Points]:
    """Return curves that can be told from each other.

    Of curves that lie on each other the middle at each time, beside those that differ from it; of too many the lowest,
    the middle and the highest; else the curves themselves.
    """
    known = {name: points for name, points in series.items() if points}
    if len(known) < _ALIKE_FROM:
        return known
    bins: list[dict[str, list[float]]] = [{} for _ in range(_BINS + 1)]
    begin, width = span.begin, max((span.end - span.begin) / _BINS, 1e-9)
    last = begin + _BINS * width
    for name, points in known.items():
        for time, value in points:
            place = 0 if time <= begin else _BINS if time >= last else int((time - begin) / width)
            bins[place].setdefault(name, []).append(value)
    full = [(begin + (place + 0.5) * width, values) for place, values in enumerate(bins) if values]
    drawn = {
        pick: [(time, choose([value for own in values.values() for value in own])) for time, values in full]
        for pick, choose in (("lowest", min), ("middle", median), ("highest", max))
    }
    if len(known) > MOST_LINES:
        return {f"{pick} of {len(known)}": points for pick, points in drawn.items()}
    unlike = _unlike([values for _, values in full], known)
    if 2 * len(unlike) >= len(known):
        return known
    return {f"middle of {len(known)}": drawn["middle"], **{name: known[name] for name in unlike}}


def _unlike(bins: Sequence[Mapping[str, Sequence[float]]], names: Iterable[str]) -> list[str]:
    """Return whose curve is away from the middle of all, over the time in which it was seen."""
    top = max((value for values in bins for own in values.values() for value in own), default=0.0)
    away: dict[str, list[float]] = {name: [] for name in names}
    for values in bins:
        own = {name: sum(each) / len(each) for name, each in values.items()}
        middle = median(own.values())
        for name, value in own.items():
            away[name].append(abs(value - middle))
    return [name for name, each in away.items() if each and sum(each) / len(each) > _APART * top]


def timeline(bars: Sequence[Bar], ticks: Sequence[Tick], span: Span) -> Html:
    """Return attempts as bars, and what happened as ticks below them; their words show under the pointer."""
    parts = []
    for bar in bars:
        left, right = span.x(bar.begin), span.x(bar.end)
        colour = _TONES.get(bar.tone, "#888")
        box = element(
            "rect", element("title", bar.label), x=_n(left), y=8, width=_n(max(2.0, right - left)), height=18,
            fill=colour, rx=3,
        )  # fmt: skip
        parts.append(box)
    for tick in ticks:
        place, colour = _n(span.x(tick.time)), _TONES.get(tick.tone, "#888")
        parts.append(
            element(
                "line", element("title", tick.label), x1=place, x2=place, y1=30, y2=42, stroke=colour, stroke_width=3
            )
        )
    return _picture(64.0, _times(span, 60.0), *parts, label="attempts and events over time")


def _picture(height: float, *parts: Html, label: str) -> Html:
    return element("svg", *parts, viewBox=f"0 0 {_n(_WIDTH)} {_n(height)}", role="img", aria_label=label)


def _axes(top: float, span: Span) -> Html:
    right = _n(_WIDTH - _RIGHT)
    lines = []
    for share in (0.0, 0.5, 1.0):
        y = _n(_y(share * top, top))
        lines.append(element("line", x1=_n(_LEFT), x2=right, y1=y, y2=y, stroke="#8884"))
        lines.append(
            element("text", f"{share * top:g}", x=_n(_LEFT - 6), y=_n(_y(share * top, top) + 4), text_anchor="end")
        )
    return joined([*lines, _times(span, _HEIGHT - 4.0)])


def _times(span: Span, y: float) -> Html:
    days = span.end - span.begin > 86400
    form = "%m-%d %H:%M" if days else "%H:%M:%S"
    parts = []
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        time = span.begin + share * (span.end - span.begin)
        words = datetime.fromtimestamp(time).astimezone().strftime(form)
        parts.append(element("text", words, x=_n(span.x(time)), y=_n(y), text_anchor=anchor))
    return joined(parts)


def _path(points: Points, top: float, span: Span) -> Html:
    return Html(" ".join(f"{_n(span.x(time))},{_n(_y(value, top))}" for time, value in points))


def _y(value: float, top: float) -> float:
    return _TOP + (1.0 - min(1.0, value / top)) * (_HEIGHT - _TOP - _BOTTOM)


def _ceiling(value: float) -> float:
    """Return the number at the top of an axis: 1, 2 or 5 times a power of ten."""
    if value <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0, 20.0) if factor * power >= value)


def _colours(count: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
