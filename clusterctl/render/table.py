"""Renders tables without borders: with aligned columns, cut to the width of a terminal, and never cut in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clusterctl.logs.safe_text import strip_colours
from clusterctl.render.console import BOLD, Terminal, fit, pad, safe
from clusterctl.render.line_wrapping import count_columns, wrap_line

GAP = 2
"""The number of blanks between two columns."""

_NARROWEST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        right: Whether cells are aligned at the right, as for numbers.
        shrink: Whether cells are cut if the terminal is narrow; the last column with this attribute is cut first.
        wraps: Whether cells are wrapped into several lines instead of cut; possible for the last column only.
    """

    title: str
    right: bool = False
    shrink: bool = False
    wraps: bool = False


def make_columns(*titles: str) -> list[Column]:
    """Return columns with these titles; `>` before a title aligns at the right, `~` allows cutting."""
    return [Column(title=title.lstrip(">~"), right=">" in title[:2], shrink="~" in title[:2]) for title in titles]


@dataclass(frozen=True, slots=True)
class Cell:
    """A text in a style."""

    text: str
    style: tuple[str, ...] = ()


def format_cell(cell: Cell | str) -> str:
    """Return the text that a cell will show, without its style."""
    return safe(cell.text if isinstance(cell, Cell) else cell)


def render_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell | str]], terminal: Terminal, *, header: bool = True
) -> list[str]:
    """Return the lines of a table."""
    body = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    body = [[Cell(safe(cell.text), cell.style) for cell in row] for row in body]
    if header:
        body.insert(0, [Cell(column.title, (BOLD,)) for column in columns])
    widths = [max((count_columns(row[i].text) for row in body), default=0) for i in range(len(columns))]
    _shrink(widths, columns, terminal.width)
    return [line for row in body for line in _lines(row, columns, widths, terminal)]


def _shrink(widths: list[int], columns: Sequence[Column], limit: int | None) -> None:
    if limit is None:
        return
    excess = sum(widths) + GAP * (len(widths) - 1) - limit
    for index in sorted(range(len(columns)), key=lambda i: (columns[i].shrink, i), reverse=True):
        if excess <= 0 or not columns[index].shrink:
            return
        cut = min(excess, max(0, widths[index] - max(_NARROWEST, count_columns(columns[index].title))))
        widths[index] -= cut
        excess -= cut


def _lines(row: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], terminal: Terminal) -> Iterator[str]:
    texts, further = [], list[str]()
    for cell, column, width in zip(row, columns, widths, strict=True):
        text, *more = _broken(cell.text, width) if column.wraps else [fit(cell.text, width, terminal.glyphs)]
        further += more
        texts.append(pad(terminal.style(text, *cell.style), width, right=column.right))
    line = (" " * GAP).join(texts)
    yield line.rstrip() if "\x1b" not in line or strip_colours(line) == line else line.rstrip(" ")
    indent = " " * (sum(widths[:-1]) + GAP * (len(widths) - 1))
    yield from (indent + text for text in further)


def _broken(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a text, wrapped between words; a word that is too long for a line is broken."""
    for line in wrap_line(text, width):
        rest = line
        while count_columns(rest) > width > 1:
            end = next(n for n in range(width, 0, -1) if count_columns(rest[:n]) <= width)
            yield rest[:end]
            rest = rest[end:]
        yield rest
