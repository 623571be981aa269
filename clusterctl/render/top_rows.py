"""Builds the rows of `top`. A row shows a rank, an unused GPU, a node, or several nodes in the same state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median, median_low

from clusterctl.formatting import group_pairs
from clusterctl.render.run_messages import describe_worker
from clusterctl.render.stats_table import HOT_C, STALE_S, GpuStats, NodeStats
from clusterctl.render.status_report import RunSnapshot, WorkerActivity
from clusterctl.run.rules.state import WorkerState

_ODD_PERCENT = 20.0
"""The percentage points below the median GPU utilisation, beyond which a node has a row of its own."""
_BEHIND_S = 30.0
"""The seconds by which the samples of two nodes may be apart. A smaller delay of a rank means nothing."""


class FoldLevel(Enum):
    """What a row of the table stands for: one unit, a node, or all nodes in the same state."""

    RANKS = "rank"
    NODES = "node"
    ALIKE = "alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopUnit:
    """The smallest thing that `top` shows: a rank, a GPU without a rank, or a node without ranks and GPUs.

    Attributes:
        index: Position in the order of nodes and ranks.
        step_rate: Steps per second; `None` if unknown.
        trend: Past utilisation of the GPU in percent, newest last; if there is no GPU, of the node's processors.
    """

    index: int
    node: NodeStats
    gpu: GpuStats | None = None
    worker: WorkerState | None = None
    activity: WorkerActivity = field(default_factory=WorkerActivity)
    step_rate: float | None = None
    trend: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table, with one unit or several."""

    units: Sequence[TopUnit]

    @property
    def index(self) -> int:
        """The index of the first unit in this row."""
        return self.units[0].index

    @property
    def gpus(self) -> list[GpuStats]:
        """The GPUs of the units in this row."""
        return [unit.gpu for unit in self.units if unit.gpu is not None]

    @property
    def workers(self) -> list[WorkerState]:
        """The workers of the units in this row."""
        return [unit.worker for unit in self.units if unit.worker is not None]

    @property
    def nodes(self) -> list[NodeStats]:
        """The nodes of the units in this row, without duplicates."""
        return list({unit.node.node: unit.node for unit in self.units}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TopData:
    """The values that the screen of `top` shows.

    Attributes:
        nodes: The newest values of each node; times are of the head's clock.
        title: The first line, if there is no run.
        gpus_by_node: The GPUs that the run uses on each node, in order of local rank. On a node that is missing here,
            the run uses all GPUs.
        step_rates: Steps per second of each rank.
        trends: Past utilisation in percent by node and GPU (`None`: the node's processors), newest last.
        ranks_sampled_at: The time of the oldest of the newest samples of all nodes; head's clock.
        read_last_line: A function that returns the last line of a rank's output; "" if there is no output.
    """

    nodes: Sequence[NodeStats]
    view: RunSnapshot | None = None
    title: str = ""
    gpus_by_node: Mapping[str, Sequence[int]] = field(default_factory=dict)
    step_rates: Mapping[int, float] = field(default_factory=dict)
    trends: Mapping[tuple[str, int | None], Sequence[float]] = field(default_factory=dict)
    ranks_sampled_at: float | None = None
    read_last_line: Callable[[int], str] = lambda _: ""


def list_top_units(data: TopData) -> list[TopUnit]:
    """Return a `TopUnit` for each rank, GPU without a rank, and node without both, in the order of nodes and ranks."""
    every = data.view.state.workers.values() if data.view else ()
    by_node = group_pairs((worker.node, worker) for worker in every)
    found: list[TopUnit] = []
    for node in data.nodes:
        workers = sorted(by_node.get(node.node, ()), key=lambda w: w.local_rank)
        found += _of_node(data, node, workers, len(found))
    return found


def _of_node(data: TopData, node: NodeStats, workers: Sequence[WorkerState], index: int) -> list[TopUnit]:
    by_index = {gpu.gpu: gpu for gpu in node.gpus}
    used = [i for i in data.gpus_by_node.get(node.node, tuple(by_index)) if i in by_index]
    pairs: list[tuple[WorkerState | None, GpuStats | None]] = [
        (worker, by_index[used[worker.local_rank % len(used)]] if used else None) for worker in workers
    ]
    shown = {gpu.gpu for _, gpu in pairs if gpu is not None}
    pairs += [(None, gpu) for gpu in node.gpus if gpu.gpu not in shown]
    activity = data.view.activity if data.view else {}
    return [
        TopUnit(
            index=index + number,
            node=node,
            gpu=gpu,
            worker=worker,
            activity=activity.get(worker.rank, WorkerActivity()) if worker else WorkerActivity(),
            step_rate=data.step_rates.get(worker.rank) if worker else None,
            trend=data.trends.get((node.node, None if gpu is None else gpu.gpu), ()),
        )
        for number, (worker, gpu) in enumerate(pairs or [(None, None)])
    ]


def make_rows(data: TopData, units: Sequence[TopUnit], level: FoldLevel, now: float) -> list[Row]:
    """Return the rows at a fold level; at `ALIKE`, rows with few nodes come first."""
    if level is FoldLevel.RANKS:
        return [Row(units=[unit]) for unit in units]
    nodes = group_pairs((unit.node.node, unit) for unit in units)
    if level is FoldLevel.NODES:
        return [Row(units=group) for group in nodes.values()]
    usual = _Baseline(data, units)
    alike: dict[Hashable, list[TopUnit]] = {}
    for group in nodes.values():
        alike.setdefault(usual.signature(group, now), []).extend(group)
    return sorted((Row(units=group) for group in alike.values()), key=lambda row: (len(row.nodes), row.index))


def find_finest_level(units: Sequence[TopUnit], room: int) -> FoldLevel:
    """Return the most detailed level at which all rows fit on the screen."""
    if len(units) <= room:
        return FoldLevel.RANKS
    return FoldLevel.NODES if len({unit.node.node for unit in units}) <= room else FoldLevel.ALIKE


class _Baseline:
    """The median values of all nodes, to compare each node with."""

    def __init__(self, data: TopData, units: Sequence[TopUnit]) -> None:
        busy = [unit.gpu.util for unit in units if unit.gpu is not None and unit.gpu.util is not None]
        steps = [unit.activity.step for unit in units if unit.activity.step is not None]
        paces = [unit.step_rate for unit in units if unit.step_rate is not None]
        self._busy = median(busy) if busy else 0.0
        self._step = median_low(steps) if steps else 0
        self._behind = max(2.0, _BEHIND_S * median(paces)) if paces else 2.0
        state = None if data.view is None else data.view.state
        self._troubled = set() if state is None else {event.node for event in state.troubles.values()}
        self._links = {} if state is None else {name: node.link for name, node in state.nodes.items()}

    def signature(self, units: Sequence[TopUnit], now: float) -> Hashable:
        """Return a key that is equal for nodes in the same state."""
        node = units[0].node
        busy = [unit.gpu.util for unit in units if unit.gpu is not None and unit.gpu.util is not None]
        steps = [unit.activity.step for unit in units if unit.activity.step is not None]
        return (
            node.status,
            node.time is None or now - node.time > STALE_S,
            self._links.get(node.node, ""),
            node.node in self._troubled,
            tuple(sorted({describe_worker(unit.worker) for unit in units if unit.worker is not None})),
            bool(busy) and min(busy) < self._busy - _ODD_PERCENT,
            any(unit.gpu is not None and (unit.gpu.temp_c or 0.0) >= HOT_C for unit in units),
            not steps or min(steps) < self._step - self._behind,
        )


SORTS: dict[str, str] = {
    "n": "node",
    "r": "rank",
    "u": "util",
    "m": "memory",
    "t": "temp",
    "p": "power",
    "c": "cpu",
    "s": "step",
    "i": "it/s",
    "o": "output",
}
"""The column that each key sorts by. Pressing the key again reverses the order."""

_LARGEST_FIRST = ("util", "memory", "temp", "power", "cpu", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOrder:
    """The order of the rows, and the first visible row.

    Attributes:
        fold_level: What a row stands for; `None`: the finest level at which all rows fit.
    """

    column: str = "node"
    is_reversed: bool = False
    first_row: int = 0
    fold_level: FoldLevel | None = None


_KEYS: dict[str, Callable[[TopUnit], float | None]] = {
    "node": lambda unit: unit.index,
    "rank": lambda unit: unit.worker.rank if unit.worker else None,
    "util": lambda unit: unit.gpu.util if unit.gpu else None,
    "memory": lambda unit: unit.gpu.mem_used if unit.gpu else None,
    "temp": lambda unit: unit.gpu.temp_c if unit.gpu else None,
    "power": lambda unit: unit.gpu.power_w if unit.gpu else None,
    "cpu": lambda unit: unit.node.cpu,
    "step": lambda unit: unit.activity.step,
    "it/s": lambda unit: unit.step_rate,
    "output": lambda unit: unit.activity.last_output_s,
}


def sort_rows(rows: Sequence[Row], order: TableOrder) -> list[Row]:
    """Return sorted rows. Rows without a value in the sorted column come last in both directions.

    A row with several units has the position of the unit that comes first.
    """
    if order.column == "node" and not order.is_reversed:
        return list(rows)
    largest_first = (order.column in _LARGEST_FIRST) != order.is_reversed
    known, unknown = [], []
    for row in rows:
        value = _first(map(_KEYS[order.column], row.units), largest_first=largest_first)
        if value is None:
            unknown.append(row)
        else:
            known.append((value, -row.index if largest_first else row.index, row))
    known.sort(key=lambda found: found[:2], reverse=largest_first)
    return [found[2] for found in known] + unknown


def _first(values: Iterable[float | None], *, largest_first: bool) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return max(known) if largest_first else min(known)
