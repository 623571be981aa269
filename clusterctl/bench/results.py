"""What the runs of a scaling report say: time per epoch, speed-up, efficiency, and where the rest goes. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.agent.worker.bench_model import MARK
from clusterctl.bench.series import SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PARTS = ("data", "compute", "comm", "wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One mode on one number of workers.

    Attributes:
        epoch_s: Seconds of an epoch, on the slowest worker.
        parts: Seconds of an epoch that each of `PARTS` takes when they are done one after the other; `None` for what
            cannot be told.
    """

    mode: str
    workers: int
    epoch_s: float
    parts: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Measured):
    """A measurement beside the one that all are compared with.

    Attributes:
        speedup: How many times faster than one worker.
        efficiency: Of that, each worker's part: 1 is perfect.
    """

    speedup: float
    efficiency: float


def read_model(output: str) -> list[Measured]:
    """Read what the built-in model printed."""
    lines = [line[len(MARK) :] for line in output.splitlines() if line.startswith(MARK)]
    return [
        Measured(
            mode=said["mode"],
            workers=said["workers"],
            epoch_s=said["epoch_s"],
            parts={name: said.get(name) for name in PARTS},
        )
        for said in map(json.loads, lines)
    ]


def steps_of_job(samples: Iterable[Mapping[str, Any]], rank: int) -> list[tuple[float, int]]:
    """Return when a rank had done how many steps (node's monotonic clock, step), from its activity samples.

    A sample tells how old the newest step was, so the times are those of the steps and not of the samples.
    """
    seconds: dict[int, float] = {}
    for sample in samples:
        inside = (sample.get("ranks", {}).get(str(rank)) or {}).get("inside") or {}
        step, age = inside.get("step"), inside.get("progress_age_s")
        if step is not None and age is not None:
            seconds[step] = sample["m"] - age
    return [(time, step) for step, time in sorted(seconds.items())]


def epoch_of_job(steps: Sequence[tuple[float, int]], started: float, exited: float, epochs: int) -> float:
    """Return seconds per epoch of a user's job: from the beginning of its first step to its exit.

    The first step began as long before the first one seen as the pace of those seen says; so imports and joining do not
    count. Where no pace was seen (a job of a few seconds, or one that is not watched from inside) they do.

    Args:
        steps: See `steps_of_job`.
        started: When the rank started, on the clock of the steps.
        exited: When it exited.
        epochs: How many it trains.
    """
    begin = started
    if len(steps) > 1:
        (first, begun), (last, done) = steps[0], steps[-1]
        begin = max(started, first - (last - first) / (done - begun) * (begun + 1))
    return (exited - begin) / epochs


def compared(measured: Sequence[Measured]) -> list[Row]:
    """Set every measurement beside the single device, or beside the fewest workers where there is none."""
    if not measured:
        return []
    base = next((m for m in measured if m.mode == SINGLE), min(measured, key=lambda m: m.workers))
    rows = []
    for one in measured:
        speedup = base.epoch_s / one.epoch_s * base.workers
        rows.append(
            Row(
                mode=one.mode,
                workers=one.workers,
                epoch_s=one.epoch_s,
                parts=one.parts,
                speedup=speedup,
                efficiency=speedup / one.workers,
            )
        )
    return rows


_PLAUSIBLE = 1.15
"""Caches that fit better make workers a little faster than their number; more than this is chance."""


def doubt(rows: Sequence[Row]) -> str | None:
    """Return in words which speed-ups are too good to be true, so that none of the numbers is to be relied on."""
    odd = [row for row in rows if row.efficiency > _PLAUSIBLE]
    if not odd:
        return None
    names = ", ".join(f"{row.speedup:.2f} by {row.mode} on {row.workers}" for row in odd)
    return f"a speed-up of {names} cannot be: what was measured is too short, and its numbers are noise"


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the published shape; durations in seconds, `null` for what cannot be told."""
    return [
        {
            "mode": row.mode,
            "workers": row.workers,
            "epoch_s": round(row.epoch_s, 6),
            "speedup": round(row.speedup, 4),
            "efficiency": round(row.efficiency, 4),
            **{name: None if (value := row.parts.get(name)) is None else round(value, 6) for name in PARTS},
        }
        for row in rows
    ]


def shares(row: Row) -> dict[str, float | None]:
    """Return each part's share of all parts, 0 to 1; `None` for what cannot be told."""
    total = sum(value or 0.0 for value in row.parts.values())
    return {n: None if (v := row.parts.get(n)) is None or not total else v / total for n in PARTS}
