"""What ranks and machines did over a whole run, from the nodes' samples: few points, in bounded time."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from clusterctl.agent.protocol import run_files
from clusterctl.validation import samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from clusterctl.run.record.rundir import RunDir

T = TypeVar("T")

Point = tuple[float, float]
"""A wall clock time of the head, and a value."""

MOST_SAMPLES = 2000
"""Samples of each kind that are read of a run, of all its nodes together."""
_MOST_OF_MANY = 1000
"""The same where there are so many nodes that a picture shows the lowest, the middle and the highest of them alone."""
MANY_NODES = 16
MOST_POINTS = 200
_FEWEST = 5
_PIECE = 16 << 10
_KINDS: tuple[samples.SampleKind, ...] = ("activity", "health")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Values over time.

    Attributes:
        steps: Rank to the steps that it had reached.
        machines: What was measured (`gpu`, `gpu memory`, `temperature`, `power`, `cpu`, `memory`), by node.
    """

    steps: Mapping[int, Sequence[Point]] = field(default_factory=dict)
    machines: Mapping[str, Mapping[str, Sequence[Point]]] = field(default_factory=dict)

    def slowest_since(self, began: float | None) -> int | None:
        """Return the least step that ranks had reached when they were last seen, of those that were seen since then."""
        last = (points[-1] for points in self.steps.values())
        return min((int(step) for moment, step in last if began is None or moment >= began), default=None)


def curves(run: RunDir, nodes: Mapping[str, float]) -> Curves:
    """Return the curves of a run.

    Args:
        run: Which.
        nodes: Those that took part, with the seconds by which their wall clocks are ahead of the head's.
    """
    steps: dict[int, list[Point]] = {}
    machines: dict[str, dict[str, list[Point]]] = {}
    budget = MOST_SAMPLES if len(nodes) <= MANY_NODES else _MOST_OF_MANY
    most = min(MOST_POINTS, max(_FEWEST, budget // max(1, len(nodes))))
    for place, (node, ahead) in enumerate(nodes.items()):
        lines = _chosen(run.node(node) / run_files.SAMPLES_FILE, most, place / len(nodes))
        for moment, reached in filter(None, map(samples.parse_steps, lines["activity"])):
            for rank, step in reached:
                steps.setdefault(rank, []).append((moment - ahead, step))
        for moment, measured in filter(None, map(samples.parse_host_usage, lines["health"])):
            for what, value in measured.items():
                machines.setdefault(what, {}).setdefault(node, []).append((moment - ahead, value))
    return Curves(
        steps={rank: thinned(steps[rank]) for rank in sorted(steps)},
        machines={what: {node: thinned(points) for node, points in by.items()} for what, by in machines.items()},
    )


def thinned(points: Iterable[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most so many of the points, in the order of time, evenly chosen; the last one is among them."""
    return _evenly(sorted(points), most)


def _chosen(path: Path, most: int, phase: float) -> dict[str, list[bytes]]:
    """Return lines of a file by kind of sample, evenly chosen over its time, at most so many of each.

    Args:
        path: The file. Of a long one pieces are read; the first and the last line of a piece may be cut, and are then
            no samples.
        most: Of each kind.
        phase: From 0 to 1: where the pieces of this node lie between those of the others.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= most * _PIECE:
            file.seek(0)
            lines = file.read().split(b"\n")
            return {
                kind: _evenly([line for line in lines if samples.may_be_sample(line, kind)], most) for kind in _KINDS
            }
        places = [int((index + phase) * (size - _PIECE) / (most - 1)) for index in range(most - 1)]
        chosen: dict[str, list[bytes]] = {kind: [] for kind in _KINDS}
        for place in [*places, size - _PIECE]:
            file.seek(place)
            lines = file.read(_PIECE).split(b"\n")[1:-1]
            for kind in _KINDS:
                chosen[kind] += [line for line in lines if samples.may_be_sample(line, kind)][-1:]
        return chosen
    return {kind: [] for kind in _KINDS}


def _evenly(things: Sequence[T], most: int) -> list[T]:
    """Return at most so many, evenly chosen; the first and the last are among them."""
    if len(things) <= most:
        return list(things)
    return [things[round(index * (len(things) - 1) / (most - 1))] for index in range(most)]
