"""Parses and validates a node's samples: measurements of its ranks (`activity`) and of the machine (`health`).

A chart needs thousands of samples. For charts, `parse_rank_steps` and `parse_host_usage` read only the values that a
chart shows, because this is much faster than decoding and validating whole samples.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.record_types import ActivitySample, HealthSample
from clusterctl.agent.protocol.validators import any_json
from clusterctl.validation.derived_validators import derive_object_validator

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


SampleKind = Literal["activity", "health"]
MAX_LINE_BYTES = 1 << 20
_VALIDATORS = {"activity": derive_object_validator(ActivitySample), "health": derive_object_validator(HealthSample)}
_KIND_SUFFIXES = {kind: f'"kind":"{kind}"}}'.encode() for kind in _VALIDATORS}
_KIND_MARKS = {
    kind: (f'"{kind}"'.encode(), end, tuple(_KIND_SUFFIXES.values())) for kind, end in _KIND_SUFFIXES.items()
}
_UNKNOWN_KIND = any_json(8, 4096, 65536)


class RankFields(NamedTuple):
    """The fields of each rank that a reader of `activity` samples needs. Fewer fields are validated much faster.

    Attributes:
        activity: Fields of `RankActivity`, without `inside`.
        status: Fields of `WorkerStatusSample`.
    """

    activity: tuple[str, ...]
    status: tuple[str, ...]

    def select(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sample with these fields alone; the result is not validated."""
        ranks: dict[str, dict[str, Any]] = {}
        for rank, activity in (sample.get("ranks") or {}).items():
            ranks[rank] = {name: activity[name] for name in self.activity if name in activity}
            if (status := activity.get("inside")) is not None:
                ranks[rank]["inside"] = {name: status[name] for name in self.status if name in status}
        return {name: sample[name] for name in ("kind", "t", "m", "attempt") if name in sample} | {"ranks": ranks}


def parse_sample(line: bytes, fields: RankFields | None = None) -> dict[str, Any]:
    """Return a sample of any kind; with `fields`, an `activity` sample that has only these fields.

    Raises:
        FrameError: The line is incomplete, or a field is invalid.
    """
    if len(line) > MAX_LINE_BYTES:
        raise FrameError(f"a sample of {len(line)} bytes; the maximum is {MAX_LINE_BYTES}")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not a sample: {line[:80]!r}") from error
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise FrameError(f"not a sample: {line[:80]!r}")
    try:
        sample: dict[str, Any] = value if fields is None else fields.select(value)
    except _VALUE_ERRORS as error:
        raise FrameError(f"not a sample of ranks: {line[:80]!r}") from error
    _VALIDATORS.get(sample["kind"], _UNKNOWN_KIND)(sample)
    return sample


@overload
def parse_samples(
    lines: Iterable[bytes], kind: Literal["activity"], *required: str, fields: RankFields | None = None
) -> Iterator[ActivitySample]: ...
@overload
def parse_samples(lines: Iterable[bytes], kind: Literal["health"], *required: str) -> Iterator[HealthSample]: ...
def parse_samples(
    lines: Iterable[bytes], kind: SampleKind, *required: str, fields: RankFields | None = None
) -> Iterator[Any]:
    """Yield the samples of one kind that have the required fields; skip all other lines and invalid samples."""
    for line in lines:
        if may_be_sample(line, kind):
            try:
                sample = parse_sample(line, fields)
            except FrameError:
                continue
            if sample["kind"] == kind and all(name in sample for name in required):
                yield sample


def may_be_sample(line: bytes, kind: SampleKind) -> bool:
    """Return whether a line may be a sample of this kind, without decoding it.

    Nodes write the kind at the end of the line. The whole line is searched only if it does not end with a kind.
    """
    mark, end, ends = _KIND_MARKS[kind]
    return line.endswith(end) or (not line.endswith(ends) and mark in line)


class SampleLineSplitter:
    """Splits received bytes of samples into lines, and stores the incomplete last line of each node."""

    def __init__(self) -> None:
        self._incomplete: dict[str, bytes] = {}

    def split(self, node: str, payload: bytes) -> list[bytes]:
        """Return the lines that `payload` completes, in the order of the file.

        An incomplete line of more than `MAX_LINE_BYTES` is dropped.
        """
        *lines, last = (self._incomplete.pop(node, b"") + payload).split(b"\n")
        if last and len(last) <= MAX_LINE_BYTES:
            self._incomplete[node] = last
        return lines


_SAMPLE_TIME = re.compile(rb'\{"t":(\d{1,15}(?:\.\d{1,9})?),')
# JSON puts a backslash before a quote inside a text, so no text can match one of these keys.
_INSIDE_KEY = b'"inside":{'
_RANK_STEP = re.compile(
    rb'"(\d{1,9})":\{"alive":(?:true|false),[^{}]*"inside":\{"pid":\d{1,10},"step":(?:(-?\d{1,18})|null),'
)
_MAX_TIME_S = 1e15
_VALUE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The errors that arithmetic with an unexpected value may raise."""


def parse_rank_steps(line: bytes) -> tuple[float, Sequence[tuple[int, float]]] | None:
    """Return the time and the `(rank, step)` pairs of an activity sample; `None` for any other line."""
    begin = _SAMPLE_TIME.match(line)
    if begin is not None and len(line) <= MAX_LINE_BYTES and line.endswith(_KIND_SUFFIXES["activity"]):
        found = _RANK_STEP.findall(line)
        if len(found) == line.count(_INSIDE_KEY):
            return float(begin[1]), [(int(rank), float(step)) for rank, step in found if step]
    # The line differs from the form in which nodes write samples, so decode and validate the whole line.
    sample = next(parse_samples([line], "activity", "t", "ranks"), None)
    if sample is None:
        return None
    ranks = ((rank, values.get("inside")) for rank, values in sample["ranks"].items())
    steps = ((rank, inside.get("step")) for rank, inside in ranks if inside is not None)
    return sample["t"], [(int(rank), float(step)) for rank, step in steps if step is not None]


def parse_host_usage(line: bytes) -> tuple[float, Mapping[str, float]] | None:
    """Return the time and the values of a health sample; `None` for any other line.

    Over all GPUs, `gpu` is the mean utilisation, `gpu memory` and `temperature` are the maximum, and `power` is the
    sum.
    """
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        sample = json.loads(line)
        if sample["kind"] != "health" or not -_MAX_TIME_S <= sample["t"] <= _MAX_TIME_S:
            return None
        return sample["t"], dict(_measure_host(sample))
    except _VALUE_ERRORS:
        return None


def _measure_host(health: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    busy, full, hot, watts = [], [], [], []
    for gpu in health.get("gpus") or ():
        read_field = gpu.get
        if (value := read_field("util")) is not None:
            busy.append(value)
        if (value := read_field("mem_used")) is not None and (size := read_field("mem_total")):
            full.append(100.0 * value / size)
        if (value := read_field("temp_c")) is not None:
            hot.append(value)
        if (value := read_field("power_w")) is not None:
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
