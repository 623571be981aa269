"""Tables without borders: aligned, cut to fit a terminal, never cut in a pipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.logs.clean import strip_colours
from clusterctl.render.terminal.console import BOLD, fit, pad, safe
from clusterctl.render.terminal.wrapping import cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.render.terminal.console import Terminal

GAP = 2
"""Blanks between columns."""

_NARROWEST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column.

    Attributes:
        right: Numbers stand at the right.
        shrink: May be cut where the terminal is narrow; the last such column is cut first.
    """

    title: str
    right: bool = False
    shrink: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A text in a style."""

    text: str
    style: tuple[str, ...] = ()


def text_of(cell: Cell | str) -> str:
    """Return the text that a cell will show."""
    return safe(cell.text if isinstance(cell, Cell) else cell)


def render_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell | str]], terminal: Terminal, *, header: bool = True
) -> list[str]:
    """Return the lines of a table."""
    body = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    body = [[Cell(safe(cell.text), cell.style) for cell in row] for row in body]
    if header:
        body.insert(0, [Cell(column.title, (BOLD,)) for column in columns])
    widths = [max((cells(row[i].text) for row in body), default=0) for i in range(len(columns))]
    _shrink(widths, columns, terminal.width)
    return [_line(row, columns, widths, terminal) for row in body]


def _shrink(widths: list[int], columns: Sequence[Column], limit: int | None) -> None:
    if limit is None:
        return
    excess = sum(widths) + GAP * (len(widths) - 1) - limit
    for index in sorted(range(len(columns)), key=lambda i: (columns[i].shrink, i), reverse=True):
        if excess <= 0 or not columns[index].shrink:
            return
        cut = min(excess, max(0, widths[index] - max(_NARROWEST, cells(columns[index].title))))
        widths[index] -= cut
        excess -= cut


def _line(row: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], terminal: Terminal) -> str:
    texts = []
    for cell, column, width in zip(row, columns, widths, strict=True):
        text = fit(cell.text, width, terminal.glyphs)
        texts.append(pad(terminal.style(text, *cell.style), width, right=column.right))
    return fit_end((" " * GAP).join(texts))


def fit_end(line: str) -> str:
    """Return a line without blanks at its end."""
    return line.rstrip() if "\x1b" not in line or strip_colours(line) == line else line.rstrip(" ")
