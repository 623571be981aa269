"""The rows of `top`: ranks, GPUs that no rank uses, nodes with neither; each alone, by node, or equal ones together."""

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
"""A node whose GPUs are by so much less busy than most stands alone."""
_BEHIND_S = 30.0
"""Samples of two nodes may be that far apart: a rank that is behind by less is not behind."""


class FoldLevel(Enum):
    """What a row of the table represents."""

    RANKS = "rank"
    NODES = "node"
    ALIKE = "alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopUnit:
    """A rank, a GPU that no rank uses, or a node with neither.

    Attributes:
        index: In the order of nodes and ranks.
        step_rate: Steps a second, or `None`.
        trend: How busy its GPU was, without one the node's processors: percent, the newest last.
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
    """One line of the table: one leaf or several."""

    entities: Sequence[TopUnit]

    @property
    def index(self) -> int:
        """Where its first leaf stands."""
        return self.entities[0].index

    @property
    def gpus(self) -> list[GpuStats]:
        """The GPUs of its leaves."""
        return [entity.gpu for entity in self.entities if entity.gpu is not None]

    @property
    def workers(self) -> list[WorkerState]:
        """The workers of its leaves."""
        return [entity.worker for entity in self.entities if entity.worker is not None]

    @property
    def nodes(self) -> list[NodeStats]:
        """The nodes of this row, each once."""
        return list({entity.node.node: entity.node for entity in self.entities}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TopData:
    """The content of the screen.

    Attributes:
        nodes: As their samples tell; times are of the head's clock.
        title: Stands on top where there is no run.
        gpus_by_node: Node to the GPUs that the run uses there, in order of local rank; a node that is absent uses all.
        step_rates: Rank to its steps a second.
        trends: Node and GPU (`None`: its processors) to how busy they were, the newest last.
        ranks_sampled_at: When the node was looked at whose ranks were looked at longest ago; head's clock.
        read_last_line: Gives the last line of a rank's output, "" where there is none.
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
    """Return all leaves, in order of node and rank."""
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


def make_rows(data: TopData, entities: Sequence[TopUnit], level: FoldLevel, now: float) -> list[Row]:
    """Return the rows of a level; of `ALIKE` those that are few come first."""
    if level is FoldLevel.RANKS:
        return [Row(entities=[entity]) for entity in entities]
    nodes = group_pairs((entity.node.node, entity) for entity in entities)
    if level is FoldLevel.NODES:
        return [Row(entities=group) for group in nodes.values()]
    usual = _Baseline(data, entities)
    alike: dict[Hashable, list[TopUnit]] = {}
    for group in nodes.values():
        alike.setdefault(usual.signature(group, now), []).extend(group)
    return sorted((Row(entities=group) for group in alike.values()), key=lambda row: (len(row.nodes), row.index))


def find_finest_level(entities: Sequence[TopUnit], room: int) -> FoldLevel:
    """Return the finest level at which all rows fit on the screen."""
    if len(entities) <= room:
        return FoldLevel.RANKS
    return FoldLevel.NODES if len({entity.node.node for entity in entities}) <= room else FoldLevel.ALIKE


class _Baseline:
    """The usual values of all nodes, with which each node is compared."""

    def __init__(self, data: TopData, entities: Sequence[TopUnit]) -> None:
        busy = [entity.gpu.util for entity in entities if entity.gpu is not None and entity.gpu.util is not None]
        steps = [entity.activity.step for entity in entities if entity.activity.step is not None]
        paces = [entity.step_rate for entity in entities if entity.step_rate is not None]
        self._busy = median(busy) if busy else 0.0
        self._step = median_low(steps) if steps else 0
        self._behind = max(2.0, _BEHIND_S * median(paces)) if paces else 2.0
        state = None if data.view is None else data.view.state
        self._troubled = set() if state is None else {event.node for event in state.troubles.values()}
        self._links = {} if state is None else {name: node.link for name, node in state.nodes.items()}

    def signature(self, entities: Sequence[TopUnit], now: float) -> Hashable:
        """Return a key that is equal for nodes in the same state."""
        node = entities[0].node
        busy = [entity.gpu.util for entity in entities if entity.gpu is not None and entity.gpu.util is not None]
        steps = [entity.activity.step for entity in entities if entity.activity.step is not None]
        return (
            node.status,
            node.time is None or now - node.time > STALE_S,
            self._links.get(node.node, ""),
            node.node in self._troubled,
            tuple(sorted({describe_worker(entity.worker) for entity in entities if entity.worker is not None})),
            bool(busy) and min(busy) < self._busy - _ODD_PERCENT,
            any(entity.gpu is not None and (entity.gpu.temp_c or 0.0) >= HOT_C for entity in entities),
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
"""Key to the column that it sorts by. The same key again turns the order round."""

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
    "node": lambda entity: entity.index,
    "rank": lambda entity: entity.worker.rank if entity.worker else None,
    "util": lambda entity: entity.gpu.util if entity.gpu else None,
    "memory": lambda entity: entity.gpu.mem_used if entity.gpu else None,
    "temp": lambda entity: entity.gpu.temp_c if entity.gpu else None,
    "power": lambda entity: entity.gpu.power_w if entity.gpu else None,
    "cpu": lambda entity: entity.node.cpu,
    "step": lambda entity: entity.activity.step,
    "it/s": lambda entity: entity.step_rate,
    "output": lambda entity: entity.activity.last_output_s,
}


def sort_rows(rows: Sequence[Row], order: TableOrder) -> list[Row]:
    """Return rows sorted; rows without the value come last in either direction.

    A row of several counts by the one that would come first.
    """
    if order.column == "node" and not order.is_reversed:
        return list(rows)
    largest_first = (order.column in _LARGEST_FIRST) != order.is_reversed
    known, unknown = [], []
    for row in rows:
        value = _first(map(_KEYS[order.column], row.entities), largest_first=largest_first)
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
