"""Draws curves over time in a terminal: eight dots of braille in each character, or one sign in ASCII."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterctl.formatting import format_duration
from clusterctl.render.console import ASCII, CYAN, DIM, GREEN, RED, YELLOW, Glyphs, Terminal, pad

_COLOURS = (CYAN, YELLOW, GREEN, RED)
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of the dots of a braille character, by row and column."""
_BRAILLE = 0x2800
_LABEL = 8
MIN_WIDTH = _LABEL + 8


def render_line_chart(
    curves: Mapping[str, Sequence[tuple[float, float]]], width: int, height: int, terminal: Terminal
) -> list[str]:
    """Return a chart of `height` lines: the curves, and the time since the first point below them.

    Args:
        curves: For each name, points of a time in seconds and a value. Names are shown if there are several.
        width: The columns of the chart, at least `MIN_WIDTH`.
        height: The lines of the chart, at least 3.
        terminal: The terminal, for signs and colours.
    """
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ["", *[""] * (height - 1)]
    begin, end = min(time for time, _ in points), max(time for time, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    low = 0.0 if 0.0 <= low < high / 2 else low
    columns, rows = max(1, width - _LABEL - 1), max(1, height - 1)
    canvas = _Canvas(columns, rows, is_ascii=terminal.glyphs is ASCII)
    for index, curve in enumerate(curves.values()):
        canvas.draw(
            [((time - begin) / ((end - begin) or 1.0), (value - low) / ((high - low) or 1.0)) for time, value in curve],
            index,
        )
    labels = {0: f"{high:.4g}", rows - 1: f"{low:.4g}"}
    lines = [
        f"{terminal.style(labels.get(row, '').rjust(_LABEL), DIM)} {canvas.render_row(row, terminal)}"
        for row in range(rows)
    ]
    names = [terminal.style(name, _COLOURS[i % len(_COLOURS)]) for i, name in enumerate(curves) if len(curves) > 1]
    span = format_duration(end - begin)
    foot = pad(" ".join(["0s", *names]), columns - len(span))
    return [*lines, f"{' ' * _LABEL} {terminal.style(foot, DIM) if not names else foot}{terminal.style(span, DIM)}"]


def render_trend(values: Sequence[float], width: int, glyphs: Glyphs, full_value: float = 100.0) -> str:
    """Return the newest values as a line of small columns, the newest at the right.

    Args:
        values: The values, newest last.
        width: The largest number of values to show.
        glyphs: The characters of the columns.
        full_value: The value of a column of full height.
    """
    highest = len(glyphs.trend_heights) - 1
    return "".join(
        glyphs.trend_heights[round(highest * min(1.0, max(0.0, value / full_value)))]
        if full_value > 0
        else glyphs.trend_heights[0]
        for value in values[-width:]
    )


class _Canvas:
    """The characters of a chart. Each has its dots, and the curve that was drawn last in it."""

    def __init__(self, columns: int, rows: int, *, is_ascii: bool) -> None:
        self._columns, self._rows = columns, rows
        self._dots = ((1,),) if is_ascii else _DOTS
        self._bits = [[0] * columns for _ in range(rows)]
        self._owners = [[0] * columns for _ in range(rows)]

    def draw(self, points: Sequence[tuple[float, float]], owner: int) -> None:
        """Draw lines between points; both coordinates are from 0 to 1."""
        wide, high = self._columns * len(self._dots[0]) - 1, self._rows * len(self._dots) - 1
        dots = [(round(x * wide), round((1.0 - y) * high)) for x, y in points]
        for (x0, y0), (x1, y1) in zip(dots, [*dots[1:], dots[-1]] if dots else [], strict=True):
            count = max(abs(x1 - x0), abs(y1 - y0), 1)
            for place in range(count):
                x, y = x0 + round((x1 - x0) * place / count), y0 + round((y1 - y0) * place / count)
                row, column = y // len(self._dots), x // len(self._dots[0])
                self._bits[row][column] |= self._dots[y % len(self._dots)][x % len(self._dots[0])]
                self._owners[row][column] = owner

    def render_row(self, row: int, terminal: Terminal) -> str:
        """Return the characters of a row, neighbours of one curve in one style."""
        signs = [" " if not bits else "*" if len(self._dots) == 1 else chr(_BRAILLE + bits) for bits in self._bits[row]]
        text, start = "", 0
        for place in range(1, self._columns + 1):
            if place == self._columns or self._owners[row][place] != self._owners[row][start]:
                colour = _COLOURS[self._owners[row][start] % len(_COLOURS)]
                text, start = text + terminal.style("".join(signs[start:place]), colour), place
        return text
