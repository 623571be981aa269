"""What pictures of a run take from a line of samples: those values alone are looked for, and looked at.

A picture needs thousands of lines. To check all that a sample says takes longer than to read it, and to read all that
one of ranks says takes longer than to find their steps.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import quick
from clusterctl.door import samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_BEGIN = re.compile(rb'\{"t":(\d{1,15}(?:\.\d{1,9})?),')
# A quote within a text has a stroke before it, so that no text of anybody looks like one of these names.
_INSIDE = b'"inside":{'
_STEP = re.compile(
    rb'"(\d{1,9})":\{"alive":(?:true|false),[^{}]*"inside":\{"pid":\d{1,10},"step":(?:(-?\d{1,18})|null),'
)
_MOST_TIME = 1e15
_MISFITS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a value that is not what it must be may raise where it is counted with."""


def steps(line: bytes) -> tuple[float, Sequence[tuple[int, float]]] | None:
    """Return when a sample of ranks was taken, and the step of each that tells it; `None`: it is no such sample."""
    begin = _BEGIN.match(line)
    if begin is not None and len(line) <= samples.MOST_LINE and samples.ends_as(line, "activity"):
        found = _STEP.findall(line)
        if len(found) == line.count(_INSIDE):
            return float(begin[1]), [(int(rank), float(step)) for rank, step in found if step]
    # Not as nodes write them.
    whole = next(samples.readable([line], "activity", "t", "ranks"), None)
    if whole is None:
        return None
    told = ((rank, sample.get("inside")) for rank, sample in whole["ranks"].items())
    reached = ((rank, inside.get("step")) for rank, inside in told if inside is not None)
    return whole["t"], [(int(rank), float(step)) for rank, step in reached if step is not None]


def machine(line: bytes) -> tuple[float, Mapping[str, float]] | None:
    """Return when a sample of a machine was taken, and what it says; `None`: it is no such sample.

    Of its GPUs: `gpu`, the mean use; `gpu memory`, the fullest; `temperature`, the hottest; `power`, of all together.
    """
    if len(line) > samples.MOST_LINE:
        return None
    try:
        sample = quick.loads(line)
        if sample["kind"] != "health" or not -_MOST_TIME <= sample["t"] <= _MOST_TIME:
            return None
        return sample["t"], dict(_measured(sample))
    except _MISFITS:
        return None


def _measured(health: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    busy, full, hot, watts = [], [], [], []
    for gpu in health.get("gpus") or ():
        told = gpu.get
        if (value := told("util")) is not None:
            busy.append(value)
        if (value := told("mem_used")) is not None and (size := told("mem_total")):
            full.append(100.0 * value / size)
        if (value := told("temp_c")) is not None:
            hot.append(value)
        if (value := told("power_w")) is not None:
            watts.append(value)
    if busy:
        yield "gpu", float(sum(busy) / len(busy))
    if full:
        yield "gpu memory", float(max(full))
    if hot:
        yield "temperature", float(max(hot))
    if watts:
        yield "power", float(sum(watts))
    for what, key in (("cpu", "cpu"), ("memory", "mem")):
        if (value := health.get(key)) is not None:
            yield what, float(value)
