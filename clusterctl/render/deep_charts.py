"""Computes pictures of deep measurements: a row of dots for each measure, in which slow ones are named. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from clusterctl.formatting import group_pairs
from clusterctl.health.deep.limits import Limits, estimate_deviation
from clusterctl.health.deep.measurements import Measure, Measurement
from clusterctl.render.charts import LEFT, RIGHT, WIDTH, ceiling

_TITLES = {
    Measure.GEMM_TFLOPS: "GEMM, TFLOP/s",
    Measure.MEMORY_BANDWIDTH: "memory bandwidth, GB/s",
    Measure.HOST_TO_DEVICE: "host to GPU, GB/s",
    Measure.DEVICE_TO_HOST: "GPU to host, GB/s",
    Measure.CLOCK: "clock, MHz",
    Measure.NODE_ALL_REDUCE: "all-reduce within nodes, GB/s",
    Measure.PAIR_ALL_REDUCE: "all-reduce of pairs of nodes, GB/s",
}
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A device or a pair of nodes; `text` has its name and value."""

    x: float
    text: str
    is_odd: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DotRow:
    """All devices or pairs of one measure, variant and model. `top` is the value at the right end."""

    title: str
    dots: Sequence[Dot]
    top: str
    odd: str


def make_dot_rows(measurements: Iterable[Measurement]) -> list[DotRow]:
    """Return a row for each measure, variant and model with at least two values."""
    known = [entry for entry in measurements if entry.measure in _TITLES and entry.value is not None]
    groups = group_pairs(((entry.measure, entry.variant, entry.model), entry) for entry in known)
    return [
        _make_row(" · ".join(part for part in (_TITLES[measure], variant, model) if part), entries)
        for (measure, variant, model), entries in groups.items()
        if len(entries) > 1
    ]


def _make_row(title: str, entries: Sequence[Measurement]) -> DotRow:
    values: dict[str, float] = {}
    for entry in entries:
        name = "-".join((entry.node, *entry.peers)) + ("" if entry.gpu is None else f" GPU {entry.gpu}")
        values[name] = max(entry.value or 0.0, values.get(name, 0.0))
    middle, deviation, top = median(values.values()), estimate_deviation(values.values()), ceiling(max(values.values()))
    dots = [
        Dot(
            x=LEFT + value / top * (WIDTH - LEFT - RIGHT),
            text=f"{name}: {value:.4g}",
            is_odd=len(values) > 2 and Limits().is_low(value, middle, deviation),
        )
        for name, value in sorted(values.items(), key=lambda item: item[1])
    ]
    odd = [dot.text for dot in dots if dot.is_odd]
    more = [f"{len(odd) - _MOST_NAMED} more"] if len(odd) > _MOST_NAMED else []
    return DotRow(title=title, dots=dots, top=f"{top:g}", odd=", ".join([*odd[:_MOST_NAMED], *more]))
