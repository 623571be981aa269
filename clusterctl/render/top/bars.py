"""Bars and trends, drawn with the signs that a terminal knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.render.terminal.console import Glyphs


def bar(percent: float | None, width: int, glyphs: Glyphs) -> str:
    """Return a bar of that many columns, filled by a share in percent; blank where it is not known."""
    if percent is None:
        return " " * width
    parts = len(glyphs.parts)
    filled = round(min(100.0, max(0.0, percent)) / 100.0 * width * parts)
    whole, rest = divmod(filled, parts)
    text = glyphs.parts[-1] * whole + (glyphs.parts[rest - 1] if rest else "")
    return text + glyphs.empty * (width - len(text))


def trend(values: Sequence[float], width: int, glyphs: Glyphs, most: float = 100.0) -> str:
    """Return the last so many values as a line of columns, the newest at the right.

    Args:
        values: The newest last.
        width: How many are shown at most.
        glyphs: For the columns.
        most: The value of a full column.
    """
    highest = len(glyphs.levels) - 1
    return "".join(
        glyphs.levels[round(highest * min(1.0, max(0.0, value / most)))] if most > 0 else glyphs.levels[0]
        for value in values[-width:]
    )
