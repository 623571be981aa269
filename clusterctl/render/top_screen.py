"""Renders the screen of `top`, which is never taller or wider than the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import describe_duration, fold_ranks, format_duration
from clusterctl.logs.safe_text import strip_colours
from clusterctl.render.console import BOLD, DIM, RED, Glyphs, Terminal, fit
from clusterctl.render.line_chart import render_trend
from clusterctl.render.line_wrapping import count_columns, wrap_line
from clusterctl.render.live_footer import format_step_rate
from clusterctl.render.run_messages import count_worker_states, describe_worker
from clusterctl.render.stats_table import (
    GIB,
    STALE_S,
    describe_missing_values,
    percent,
    temperature_cell,
    utilisation_style,
)
from clusterctl.render.status_report import render_run_summary, worker_cell
from clusterctl.render.table import Cell, Column, make_columns, render_table
from clusterctl.render.top_rows import (
    SORTS,
    FoldLevel,
    Row,
    TableOrder,
    TopData,
    TopUnit,
    find_finest_level,
    list_top_units,
    make_rows,
    sort_rows,
)

_MOST_NEWS = 4
_MOST_OF_ONE = 3
_WIDE = 10_000
_FOLDED = {FoldLevel.RANKS: "", FoldLevel.NODES: "a row a node", FoldLevel.ALIKE: "nodes that are alike in one row"}


def render_top(
    data: TopData, order: TableOrder, now: float, terminal: Terminal, height: int
) -> tuple[list[str], TableOrder]:
    """Return a screen of at most `height` lines, and the order with a valid first row.

    Args:
        data: The content of the screen.
        order: The sorting, the level of the rows, and the first visible row.
        now: The head's wall clock in seconds.
        terminal: The terminal, for width and colours.
        height: Lines of the screen.
    """
    head, units, room, level = _lay_out(data, order, now, terminal, height)
    rows = sort_rows(make_rows(data, units, level, now), order)
    first = max(0, min(order.first_row, len(rows) - room))
    lines = [
        *head,
        _status_line(data, units, level, now, terminal),
        *render_rows(rows[first : first + room], data, terminal.width, terminal),
    ]
    lines += [""] * max(0, height - 1 - len(lines))
    foot = _foot(order, first, room, len(rows), terminal)
    return [*lines[: height - 1], foot], replace(order, first_row=first)


def compute_fold_level(data: TopData, order: TableOrder, now: float, terminal: Terminal, height: int) -> FoldLevel:
    """Return the fold level of the rows on the screen."""
    return _lay_out(data, order, now, terminal, height)[3]


def _lay_out(
    data: TopData, order: TableOrder, now: float, terminal: Terminal, height: int
) -> tuple[list[str], list[TopUnit], int, FoldLevel]:
    """Return the lines above the table, the units, the number of rows that have room, and the rows' fold level."""
    head = _head(data, now, terminal, terminal.width or _WIDE)[: max(1, height - 4)]
    units, room = list_top_units(data), max(1, height - len(head) - 3)
    return head, units, room, order.fold_level or find_finest_level(units, room)


def _head(data: TopData, now: float, terminal: Terminal, width: int) -> list[str]:
    lines = [terminal.style(fit(data.title, width, terminal.glyphs), BOLD)]
    if data.view is not None:
        lines = render_run_summary(data.view, now, terminal)
    news = lines[1:] + [f"  {line}" for line in describe_missing_values(data.nodes, now)]
    if len(news) > _MOST_NEWS:
        news = [*news[: _MOST_NEWS - 1], f"  {len(news) - _MOST_NEWS + 1} more: `clusterctl status`"]
    news = [part for line in news for part in wrap_line(line, width)[:_MOST_OF_ONE]]
    return [_fit_line(line, width, terminal) for line in (lines[0], *news)]


def _fit_line(line: str, width: int, terminal: Terminal) -> str:
    """Return a line that fits into the width; a line that is cut loses its colours."""
    bare = strip_colours(line)
    return line if count_columns(bare) <= width else fit(bare, width, terminal.glyphs)


def _status_line(data: TopData, units: Sequence[TopUnit], level: FoldLevel, now: float, terminal: Terminal) -> str:
    """Return a line with totals, the age of the values, and the level of the rows."""
    parts = [*_describe_totals(data, units, terminal)]
    if data.view is not None and data.view.state.is_over:
        ended = data.view.state.ended
        parts.append("as it was at the end" + ("" if ended is None else f", {describe_duration(now - ended)} ago"))
    else:
        parts += _describe_ages(data, now)
    if _FOLDED[level]:
        parts.append(_FOLDED[level])
    text = f"  {f' {terminal.glyphs.dot} '.join(parts)}" if parts else ""
    return terminal.style(fit(text, terminal.width, terminal.glyphs), DIM)


def _describe_ages(data: TopData, now: float) -> list[str]:
    """Return texts with the ages of the oldest values: of ranks, and of machines (only values that are not stale)."""
    fresh = [now - n.time for n in data.nodes if n.time is not None and now - n.time <= STALE_S]
    machines = f"machines {describe_duration(max(0.0, *fresh))} ago" if len(fresh) > 1 else ""
    if len(fresh) == 1:
        machines = f"machine {describe_duration(max(0.0, fresh[0]))} ago"
    ranks = (
        "" if data.ranks_sampled_at is None else f"ranks {describe_duration(max(0.0, now - data.ranks_sampled_at))} ago"
    )
    return [text for text in (ranks, machines) if text]


def _describe_totals(data: TopData, units: Sequence[TopUnit], terminal: Terminal) -> list[str]:
    paces = [unit.step_rate for unit in units if unit.step_rate]
    parts = [format_step_rate(median(paces))] if paces else []
    of_gpus = any(unit.gpu is not None for unit in units)
    busy = average_trends([unit.trend for unit in units if (unit.gpu is not None) == of_gpus])
    if busy:
        name, trend = "GPUs" if of_gpus else "CPUs", render_trend(busy, _TREND, terminal.glyphs)
        parts.append(f"{name} {trend} {percent(busy[-1])}")
    return parts


def _foot(order: TableOrder, first: int, room: int, total: int, terminal: Terminal) -> str:
    shown = f"{first + 1}-{min(first + room, total)} of {total}  " if total > room else ""
    words = [(f"[{word}]" if word == order.column else word, key) for key, word in SORTS.items()]
    keys = " ".join(word if word.strip("[]").startswith(key) else f"{key}:{word}" for word, key in words)
    foot = f"{shown}q leave  f fold  sort: {keys}"
    if terminal.width is not None and count_columns(foot) > terminal.width:
        # Show only the keys, because a cut word is not readable.
        keys = " ".join(f"[{word}]" if word == order.column else key for key, word in SORTS.items())
        foot = f"{shown}q leave  f fold  sort: {keys}"
    return terminal.style(fit(foot, terminal.width, terminal.glyphs), DIM)


_BAR = 4
_TREND = 8
_CUT_TO = {"NODE": 28, "RANK": 16, "LAST LINE": 14}
"""The number of characters to which each of these columns is cut before another column is omitted."""
_MOST_OF_A_LINE = 8192


@dataclass(frozen=True, slots=True)
class _Column:
    """A column. If there is no room, the largest `drop_priority` is omitted first; a column with 0 always remains."""

    column: Column
    cell: Callable[[Row], Cell | str]
    drop_priority: int


def render_rows(rows: Sequence[Row], data: TopData, width: int | None, terminal: Terminal) -> list[str]:
    """Return a table of these rows with a header, no wider than the terminal.

    Args:
        rows: The visible rows.
        data: The content of the screen.
        width: Columns of the terminal; `None` cuts nothing.
        terminal: The terminal, for styles and signs.
    """
    parts = _parts(rows, data, terminal.glyphs)
    shown = [(part, [_cell(part, row) for row in rows]) for part in parts]
    shown = [column for column in shown if not rows or any(cell.text for cell in column[1])]
    while width is not None:
        missing = sum(_width(*column) for column in shown) + 2 * (len(shown) - 1) - width
        weakest = max(shown, key=lambda column: column[0].drop_priority)
        if missing <= 0 or weakest[0].drop_priority == 0:
            break
        shown.remove(weakest)
    lines = [[texts[number] for _, texts in shown] for number in range(len(rows))]
    return render_table([part.column for part, _ in shown], lines, terminal)


def _width(part: _Column, texts: Sequence[Cell]) -> int:
    widest = max([count_columns(part.column.title), *(count_columns(cell.text) for cell in texts)])
    return min(widest, _CUT_TO.get(part.column.title, widest))


def _cell(part: _Column, row: Row) -> Cell:
    cell = part.cell(row)
    return cell if isinstance(cell, Cell) else Cell(cell)


def _parts(rows: Sequence[Row], data: TopData, glyphs: Glyphs) -> list[_Column]:
    of_run = any(row.workers for row in rows)
    of_gpus = any(row.gpus for row in rows)
    workers = () if data.view is None else data.view.state.workers.values()
    all_run = all(worker.phase.value == "running" for worker in workers)
    columns = [_column("~NODE", 0, lambda row: Cell(fold_hosts(node.node for node in row.nodes), (BOLD,)))]
    if of_run:
        columns.append(_column(">~RANK", 0, lambda row: fold_ranks(worker.rank for worker in row.workers) or "-"))
        columns += [] if all_run else [_column("~STATE", 0, _state)]
        columns.append(_column(">STEP", 0, lambda row: _range([unit.activity.step for unit in row.units])))
        columns.append(_column(">IT/S", 3, lambda row: _pace([unit.step_rate for unit in row.units])))
    if of_gpus:
        columns += [
            _column(">GPU", 1, _which_gpu),
            _column(">UTIL", 0, lambda row: _util(row, glyphs)),
            _column(">GPU MEM", 0, lambda row: _memory((gpu.mem_used, gpu.mem_total) for gpu in row.gpus)),
            _column(">TEMP", 2, lambda row: temperature_cell(_largest([gpu.temp_c for gpu in row.gpus]))),
            _column(">POWER", 5, _power),
            _column(">CPU", 6, lambda row: _range([node.cpu for node in row.nodes], "%")),
        ]
    else:
        columns.append(_column(">CPU", 0, lambda row: Cell(_busy_text([node.cpu for node in row.nodes], glyphs))))
    memory_priority = 9 if of_gpus else 0
    columns.append(
        _column(">MEM", memory_priority, lambda row: _memory((node.mem_used, node.mem_total) for node in row.nodes))
    )
    columns.append(_column("TREND", 7, lambda row: Cell(_trend(row, glyphs), (DIM,))))
    if of_run:
        columns.append(_column(">OUTPUT", 8, _output))
        columns.append(_column("~LAST LINE", 4, lambda row: _last_line(row, data)))
    return columns


def _column(title: str, drop_priority: int, cell: Callable[[Row], Cell | str]) -> _Column:
    """Return a column (see `make_columns`)."""
    return _Column(make_columns(title)[0], cell, drop_priority)


def _busy_text(values: Sequence[float | None], glyphs: Glyphs) -> str:
    return f"{render_bar(_mean(values), _BAR, glyphs)} {_range(values, '%'):>4}"


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _state(row: Row) -> Cell | str:
    if not row.workers:
        return "-"
    alike = len({describe_worker(worker) for worker in row.workers}) == 1
    return worker_cell(row.workers[0]) if alike else Cell(count_worker_states(row.workers), (RED,))


def _which_gpu(row: Row) -> str:
    if len(row.nodes) == 1:
        return fold_ranks(gpu.gpu for gpu in row.gpus) or "-"
    return str(len(row.gpus)) if row.gpus else "-"


def _util(row: Row, glyphs: Glyphs) -> Cell:
    values = [gpu.util for gpu in row.gpus]
    style = utilisation_style(min((value for value in values if value is not None), default=None))
    return Cell(_busy_text(values, glyphs) if row.gpus else "-", style)


def _power(row: Row) -> str:
    known = [gpu.power_w for gpu in row.gpus if gpu.power_w is not None]
    watts = sum(known)
    return "-" if not known else f"{watts:.0f} W" if watts < 1000 else f"{watts / 1000:.1f} kW"


def _memory(pairs: Iterable[tuple[float | None, float | None]]) -> str:
    """Return the use and the size of the fullest memory, such as `71/80 GiB`."""
    known = [(used, total) for used, total in pairs if used is not None and total]
    if not known:
        return "-"
    used, total = max(known, key=lambda pair: pair[0] / pair[1])
    return f"{used / GIB:.0f}/{total / GIB:.0f} GiB"


def _pace(values: Iterable[float | None]) -> str:
    """Return the lowest speed in steps per second as text."""
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
    return render_trend(average_trends([unit.trend for unit in row.units]), _TREND, glyphs)


def average_trends(trends: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of several trends at each moment, with the length of the longest trend."""
    known: list[list[float]] = [[] for _ in range(max(map(len, trends), default=0))]
    for values in trends:
        for back, value in enumerate(reversed(values), start=1):
            known[-back].append(value)
    return [sum(values) / len(values) for values in known]


def _output(row: Row) -> str:
    ages = [unit.activity.last_output_s for unit in row.units if unit.activity.last_output_s is not None]
    return format_duration(min(ages)) if ages else "-"


def _last_line(row: Row, data: TopData) -> str:
    """Return the last line of the first failed rank; of the first rank if no rank failed."""
    workers = sorted(row.workers, key=lambda worker: (not worker.failed, worker.rank))
    return data.read_last_line(workers[0].rank)[:_MOST_OF_A_LINE] if workers else ""


def render_bar(percent: float | None, width: int, glyphs: Glyphs) -> str:
    """Return a bar of `width` columns, filled to a percentage; blank if the percentage is unknown."""
    if percent is None:
        return " " * width
    parts = len(glyphs.bar_fills)
    filled = round(min(100.0, max(0.0, percent)) / 100.0 * width * parts)
    whole, rest = divmod(filled, parts)
    text = glyphs.bar_fills[-1] * whole + (glyphs.bar_fills[rest - 1] if rest else "")
    return text + glyphs.bar_background * (width - len(text))
