"""How rows of `top` are sorted, and what of them is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from clusterctl.render.top.scene import Leaf, Level, Row

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
class Order:
    """How rows are sorted, and which is the first that is shown.

    Attributes:
        fold: What a row stands for; `None`: the finest level of which all rows have room.
    """

    by: str = "node"
    turned: bool = False
    first: int = 0
    fold: Level | None = None


_KEYS: dict[str, Callable[[Leaf], float | None]] = {
    "node": lambda leaf: leaf.place,
    "rank": lambda leaf: leaf.worker.rank if leaf.worker else None,
    "util": lambda leaf: leaf.gpu.util if leaf.gpu else None,
    "memory": lambda leaf: leaf.gpu.mem_used if leaf.gpu else None,
    "temp": lambda leaf: leaf.gpu.temp_c if leaf.gpu else None,
    "power": lambda leaf: leaf.gpu.power_w if leaf.gpu else None,
    "cpu": lambda leaf: leaf.node.cpu,
    "step": lambda leaf: leaf.activity.step,
    "it/s": lambda leaf: leaf.pace,
    "output": lambda leaf: leaf.activity.last_output_s,
}


def in_order(rows: Sequence[Row], order: Order) -> list[Row]:
    """Return rows sorted; rows without the value come last in either direction.

    A row of several counts by the one that would come first.
    """
    if order.by == "node" and not order.turned:
        return list(rows)
    largest_first = (order.by in _LARGEST_FIRST) != order.turned
    known, unknown = [], []
    for row in rows:
        value = _first(map(_KEYS[order.by], row.leaves), largest_first=largest_first)
        if value is None:
            unknown.append(row)
        else:
            known.append((value, -row.place if largest_first else row.place, row))
    known.sort(key=lambda found: found[:2], reverse=largest_first)
    return [found[2] for found in known] + unknown


def _first(values: Iterable[float | None], *, largest_first: bool) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return max(known) if largest_first else min(known)
