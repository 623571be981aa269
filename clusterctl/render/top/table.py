"""The table of `top`: columns make room for one another where the screen is narrow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.formatting import format_duration
from clusterctl.render.ranks import fold_nodes, fold_ranks
from clusterctl.render.stats import GIB, HOT_C, percent, util_style
from clusterctl.render.status import worker_cell
from clusterctl.render.terminal.console import BOLD, DIM, RED, Glyphs
from clusterctl.render.terminal.table import Cell, Column, render_table
from clusterctl.render.terminal.wrapping import cells
from clusterctl.render.top.bars import bar, trend
from clusterctl.render.words import summary, worker_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from clusterctl.render.terminal.console import Terminal
    from clusterctl.render.top.scene import Row, Scene

_BAR = 4
_TREND = 8
_CUT_TO = {"NODE": 28, "RANK": 16, "LAST LINE": 14}
"""Columns that are cut to so much before another column goes."""
_MOST_OF_A_LINE = 8192


@dataclass(frozen=True, slots=True)
class _Part:
    """A column: the one with the largest need goes first where there is no room; 0 stays."""

    column: Column
    cell: Callable[[Row], Cell | str]
    need: int


def table(rows: Sequence[Row], scene: Scene, width: int | None, terminal: Terminal) -> list[str]:
    """Return the table of these rows, with a header; no wider than the terminal.

    Args:
        rows: Those that are shown.
        scene: Whose they are.
        width: Columns of the terminal; `None` where nothing is cut.
        terminal: For styles and signs.
    """
    parts = _parts(rows, scene, terminal.glyphs)
    shown = [(part, [_cell(part, row) for row in rows]) for part in parts]
    shown = [column for column in shown if not rows or any(cell.text for cell in column[1])]
    while width is not None:
        missing = sum(_width(*column) for column in shown) + 2 * (len(shown) - 1) - width
        weakest = max(shown, key=lambda column: column[0].need)
        if missing <= 0 or weakest[0].need == 0:
            break
        shown.remove(weakest)
    lines = [[texts[number] for _, texts in shown] for number in range(len(rows))]
    return render_table([part.column for part, _ in shown], lines, terminal)


def _width(part: _Part, texts: Sequence[Cell]) -> int:
    widest = max([cells(part.column.title), *(cells(cell.text) for cell in texts)])
    return min(widest, _CUT_TO.get(part.column.title, widest))


def _cell(part: _Part, row: Row) -> Cell:
    cell = part.cell(row)
    return cell if isinstance(cell, Cell) else Cell(cell)


def _parts(rows: Sequence[Row], scene: Scene, glyphs: Glyphs) -> list[_Part]:
    of_run = any(row.workers for row in rows)
    of_gpus = any(row.gpus for row in rows)
    workers = () if scene.view is None else scene.view.state.workers.values()
    all_run = all(worker.phase.value == "running" for worker in workers)
    parts = [
        _Part(Column(title="NODE", shrink=True), lambda row: Cell(fold_nodes(n.node for n in row.nodes), (BOLD,)), 0)
    ]
    if of_run:
        parts += _of_ranks(all_run=all_run)
    parts += _of_gpus(glyphs) if of_gpus else _of_processors(glyphs)
    if of_gpus:
        parts += [
            _Part(Column(title="CPU", right=True), lambda row: _range([n.cpu for n in row.nodes], "%"), 6),
            _Part(
                Column(title="MEM", right=True), lambda row: _memory((n.mem_used, n.mem_total) for n in row.nodes), 9
            ),
        ]
    parts.append(_Part(Column(title="TREND"), lambda row: Cell(_trend(row, glyphs), (DIM,)), 7))
    if of_run:
        parts.append(_Part(Column(title="OUTPUT", right=True), _output, 8))
        parts.append(_Part(Column(title="LAST LINE", shrink=True), lambda row: _last_line(row, scene), 4))
    return parts


def _of_ranks(*, all_run: bool) -> list[_Part]:
    parts = [
        _Part(
            Column(title="RANK", right=True, shrink=True), lambda row: fold_ranks(w.rank for w in row.workers) or "-", 0
        ),
        _Part(Column(title="STATE", shrink=True), _state, 0),
        _Part(Column(title="STEP", right=True), lambda row: _range([leaf.activity.step for leaf in row.leaves]), 0),
        _Part(Column(title="IT/S", right=True), lambda row: _pace([leaf.pace for leaf in row.leaves]), 3),
    ]
    return [part for part in parts if part.column.title != "STATE" or not all_run]


def _of_gpus(glyphs: Glyphs) -> list[_Part]:
    return [
        _Part(Column(title="GPU", right=True), _which_gpu, 1),
        _Part(Column(title="UTIL", right=True), lambda row: _util(row, glyphs), 0),
        _Part(Column(title="GPU MEM", right=True), lambda row: _memory((g.mem_used, g.mem_total) for g in row.gpus), 0),
        _Part(Column(title="TEMP", right=True), _temperature, 2),
        _Part(Column(title="POWER", right=True), _power, 5),
    ]


def _of_processors(glyphs: Glyphs) -> list[_Part]:
    def busy(row: Row) -> Cell:
        values = [n.cpu for n in row.nodes]
        return Cell(f"{bar(_mean(values), _BAR, glyphs)} {_range(values, '%'):>4}")

    return [
        _Part(Column(title="CPU", right=True), busy, 0),
        _Part(Column(title="MEM", right=True), lambda row: _memory((n.mem_used, n.mem_total) for n in row.nodes), 0),
    ]


def _state(row: Row) -> Cell | str:
    if not row.workers:
        return "-"
    alike = len({worker_state(worker) for worker in row.workers}) == 1
    return worker_cell(row.workers[0]) if alike else Cell(summary(row.workers), (RED,))


def _which_gpu(row: Row) -> str:
    if len(row.nodes) == 1:
        return fold_ranks(gpu.gpu for gpu in row.gpus) or "-"
    return str(len(row.gpus)) if row.gpus else "-"


def _util(row: Row, glyphs: Glyphs) -> Cell:
    values = [gpu.util for gpu in row.gpus]
    style = util_style(min((v for v in values if v is not None), default=None))
    return Cell(f"{bar(_mean(values), _BAR, glyphs)} {_range(values, '%'):>4}" if row.gpus else "-", style)


def _temperature(row: Row) -> Cell:
    hottest = max((gpu.temp_c for gpu in row.gpus if gpu.temp_c is not None), default=None)
    hot = hottest is not None and hottest >= HOT_C
    return Cell("-" if hottest is None else f"{hottest:.0f} C", (RED,) if hot else ())


def _power(row: Row) -> str:
    known = [gpu.power_w for gpu in row.gpus if gpu.power_w is not None]
    watts = sum(known)
    return "-" if not known else f"{watts:.0f} W" if watts < 1000 else f"{watts / 1000:.1f} kW"


def _memory(pairs: Iterable[tuple[float | None, float | None]]) -> str:
    """Return the fullest as `71/80 GiB`."""
    known = [(used, total) for used, total in pairs if used is not None and total]
    if not known:
        return "-"
    used, total = max(known, key=lambda pair: pair[0] / pair[1])
    return f"{used / GIB:.0f}/{total / GIB:.0f} GiB"


def _pace(values: Iterable[float | None]) -> str:
    """Return the slowest."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    slowest = min(known)
    return f"{slowest:.0f}" if slowest >= 100 else f"{slowest:.1f}" if slowest >= 1 or not slowest else f"{slowest:.2f}"


def _range(values: Iterable[float | None], unit: str = "") -> str:
    known = [round(value) for value in values if value is not None]
    if not known:
        return "-"
    low, high = min(known), max(known)
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _trend(row: Row, glyphs: Glyphs) -> str:
    return trend(mean_trend([leaf.trend for leaf in row.leaves]), _TREND, glyphs)


def mean_trend(trends: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of several trends, as long as the longest of them."""
    known: list[list[float]] = [[] for _ in range(max(map(len, trends), default=0))]
    for values in trends:
        for back, value in enumerate(reversed(values), start=1):
            known[-back].append(value)
    return [sum(values) / len(values) for values in known]


def _output(row: Row) -> str:
    ages = [leaf.activity.last_output_s for leaf in row.leaves if leaf.activity.last_output_s is not None]
    return format_duration(min(ages)) if ages else "-"


def _last_line(row: Row, scene: Scene) -> str:
    """Return the last line of the first rank that failed, else of the first."""
    workers = sorted(row.workers, key=lambda worker: (not worker.failed, worker.rank))
    return scene.last_line(workers[0].rank)[:_MOST_OF_A_LINE] if workers else ""


def busy_text(scene_trend: Sequence[float], name: str, glyphs: Glyphs) -> str:
    """Return how busy something was and is: `GPUs ▆▇█ 96%`."""
    return f"{name} {trend(scene_trend, _TREND, glyphs)} {percent(scene_trend[-1])}"
