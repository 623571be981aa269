"""`top`: one screen of a run, a row for each rank with its GPU, never taller or wider than the terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.render.stats import percent, power_text, remarks, temp_cell, util_cell
from clusterctl.render.status import RunView, WorkerActivity, render_summary, worker_cell
from clusterctl.render.terminal.console import BOLD, DIM, cells, fit
from clusterctl.render.terminal.table import Cell, Column, render_table
from clusterctl.wording import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from clusterctl.render.stats import GpuStats, NodeStats
    from clusterctl.render.terminal.console import Terminal
    from clusterctl.run.rules.state import WorkerState

_GIB = 1024**3
_MOST_NEWS = 4
_WIDE = 10_000

SORTS: dict[str, str] = {
    "n": "node",
    "r": "rank",
    "u": "util",
    "m": "memory",
    "t": "temp",
    "p": "power",
    "c": "cpu",
    "s": "step",
    "o": "output",
}
"""Key to the column that it sorts by. The same key again turns the order round."""

_LARGEST_FIRST = ("util", "memory", "temp", "power", "cpu", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How rows are sorted, and which is the first that is shown."""

    by: str = "node"
    turned: bool = False
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A rank, a GPU that no rank uses, or a node with neither."""

    place: int
    node: NodeStats
    gpu: GpuStats | None = None
    worker: WorkerState | None = None
    activity: WorkerActivity = field(default_factory=WorkerActivity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What there is to show.

    Attributes:
        title: Stands on top where there is no run.
        gpus_of: Node to the GPUs that the run uses there, in order of local rank; a node that is absent uses all.
    """

    nodes: Sequence[NodeStats]
    view: RunView | None = None
    title: str = ""
    gpus_of: Mapping[str, Sequence[int]] = field(default_factory=dict)


def rows_of(scene: Scene) -> list[Row]:
    """Return all rows, in order of node and rank."""
    rows: list[Row] = []
    for node in scene.nodes:
        rows += _rows_of_node(scene, node, len(rows))
    return rows


def _rows_of_node(scene: Scene, node: NodeStats, place: int) -> list[Row]:
    workers = [w for w in scene.view.state.workers.values() if w.node == node.node] if scene.view else []
    workers.sort(key=lambda w: w.local_rank)
    by_index = {gpu.gpu: gpu for gpu in node.gpus}
    used = [i for i in scene.gpus_of.get(node.node, tuple(by_index)) if i in by_index]
    rows: list[Row] = []
    for worker in workers:
        gpu = by_index[used[worker.local_rank % len(used)]] if used else None
        activity = scene.view.activity.get(worker.rank, WorkerActivity()) if scene.view else WorkerActivity()
        rows.append(Row(place=place + len(rows), node=node, gpu=gpu, worker=worker, activity=activity))
    shown = {row.gpu.gpu for row in rows if row.gpu}
    for gpu in node.gpus:
        if gpu.gpu not in shown:
            rows.append(Row(place=place + len(rows), node=node, gpu=gpu))
    return rows or [Row(place=place, node=node)]


_KEYS: dict[str, Callable[[Row], float | None]] = {
    "node": lambda row: row.place,
    "rank": lambda row: row.worker.rank if row.worker else None,
    "util": lambda row: row.gpu.util if row.gpu else None,
    "memory": lambda row: row.gpu.mem_used if row.gpu else None,
    "temp": lambda row: row.gpu.temp_c if row.gpu else None,
    "power": lambda row: row.gpu.power_w if row.gpu else None,
    "cpu": lambda row: row.node.cpu,
    "step": lambda row: row.activity.step,
    "output": lambda row: row.activity.last_output_s,
}


def in_order(rows: Sequence[Row], order: Order) -> list[Row]:
    """Return rows sorted; rows without the value come last in either direction."""
    value = _KEYS[order.by]
    valued = [row for row in rows if value(row) is not None]
    largest_first = (order.by in _LARGEST_FIRST) != order.turned
    valued.sort(key=lambda row: (value(row) or 0.0, -row.place if largest_first else row.place), reverse=largest_first)
    return valued + [row for row in rows if value(row) is None]


def render_top(scene: Scene, order: Order, now: float, terminal: Terminal, height: int) -> tuple[list[str], Order]:
    """Return one screen of at most `height` lines, and the order with a first row that exists.

    Args:
        scene: What there is to show.
        order: How it is sorted, and from where it is shown.
        now: The head's wall clock in seconds.
        terminal: For width and colours.
        height: Lines of the screen.
    """
    width = terminal.width or _WIDE
    head = _head(scene, now, terminal, width)[: max(1, height - 4)]
    rows = in_order(rows_of(scene), order)
    room = max(1, height - len(head) - 3)
    first = max(0, min(order.first, len(rows) - room))
    table = _table(rows[first : first + room], width, terminal)
    filled = [*head, "", *table]
    filled += [""] * max(0, height - 1 - len(filled))
    lines = [*filled[: height - 1], _foot(order, first, room, len(rows), width, terminal)]
    return lines, Order(by=order.by, turned=order.turned, first=first)


def _head(scene: Scene, now: float, terminal: Terminal, width: int) -> list[str]:
    lines = [terminal.style(fit(scene.title, width, terminal.glyphs), BOLD)]
    if scene.view is not None:
        lines = render_summary(scene.view, now, terminal)
    news = lines[1:] + [f"  {line}" for line in remarks(scene.nodes, now)]
    if len(news) > _MOST_NEWS:
        news = [*news[: _MOST_NEWS - 1], f"  {len(news) - _MOST_NEWS + 1} more: `clusterctl status`"]
    # The first line carries colours and is short; the others are plain.
    return lines[:1] + [fit(line, width, terminal.glyphs) for line in news]


def _foot(order: Order, first: int, room: int, total: int, width: int, terminal: Terminal) -> str:
    marks = ((key, f"[{word}]" if word == order.by else word) for key, word in SORTS.items())
    keys = " ".join(word if word.strip("[]").startswith(key) else f"{key}:{word}" for key, word in marks)
    shown = f"{first + 1}-{min(first + room, total)} of {total}  " if total > room else ""
    return terminal.style(fit(f"{shown}q leave  sort: {keys}", width, terminal.glyphs), DIM)


@dataclass(frozen=True, slots=True)
class _Part:
    """A column: what is shown last goes first where there is no room."""

    column: Column
    cell: Callable[[Row], Cell | str]
    need: int


_GPU_PARTS = ("GPU", "UTIL", "GPU MEM", "TEMP", "POWER")
_RUN_PARTS = ("RANK", "STATE", "STEP", "OUTPUT")


def _table(rows: Sequence[Row], width: int, terminal: Terminal) -> list[str]:
    parts = list(_PARTS)
    if not any(row.gpu for row in rows):
        parts = [part for part in parts if part.column.title not in _GPU_PARTS]
    if not any(row.worker for row in rows):
        parts = [part for part in parts if part.column.title not in _RUN_PARTS]
    while True:
        texts = [[_cell(part, row) for part in parts] for row in rows]
        widths = [
            max([cells(part.column.title), *(cells(line[i].text) for line in texts)]) for i, part in enumerate(parts)
        ]
        missing = sum(widths) + 2 * (len(parts) - 1) - width
        weakest = max(parts, key=lambda part: part.need)
        if missing <= 0 or weakest.need == 0:
            return render_table([part.column for part in parts], texts, terminal)
        parts.remove(weakest)


def _cell(part: _Part, row: Row) -> Cell:
    cell = part.cell(row)
    return cell if isinstance(cell, Cell) else Cell(cell)


def _of_gpu(show: Callable[[GpuStats], Cell | str]) -> Callable[[Row], Cell | str]:
    return lambda row: "-" if row.gpu is None else show(row.gpu)


def _memory(gpu: GpuStats) -> str:
    if gpu.mem_used is None or gpu.mem_total is None:
        return "-"
    return f"{gpu.mem_used / _GIB:.0f}/{gpu.mem_total / _GIB:.0f}G"


def _output(row: Row) -> str:
    age = row.activity.last_output_s
    return "-" if age is None else duration(age)


_PARTS = (
    _Part(Column(title="NODE", shrink=True), lambda row: Cell(row.node.node, (BOLD,)), 0),
    _Part(Column(title="CPU", right=True), lambda row: percent(row.node.cpu), 2),
    _Part(Column(title="MEM", right=True), lambda row: percent(row.node.mem), 3),
    _Part(Column(title="GPU", right=True), _of_gpu(lambda gpu: str(gpu.gpu)), 0),
    _Part(Column(title="UTIL", right=True), _of_gpu(util_cell), 0),
    _Part(Column(title="GPU MEM", right=True), _of_gpu(_memory), 0),
    _Part(Column(title="TEMP", right=True), _of_gpu(temp_cell), 0),
    _Part(Column(title="POWER", right=True), _of_gpu(power_text), 1),
    _Part(Column(title="RANK", right=True), lambda row: str(row.worker.rank) if row.worker else "-", 0),
    _Part(Column(title="STATE", shrink=True), lambda row: worker_cell(row.worker) if row.worker else "-", 0),
    _Part(
        Column(title="STEP", right=True), lambda row: "-" if row.activity.step is None else str(row.activity.step), 0
    ),
    _Part(Column(title="OUTPUT", right=True), _output, 4),
)
