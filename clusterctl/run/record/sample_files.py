"""Reads the samples of a run from the files on the head: latest samples, statistics of a node, and curves over time."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.agent.protocol.record_types import ActivitySample, HealthSample
from clusterctl.agent.protocol.run_files import SAMPLES_FILE
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import LineTail
from clusterctl.run.rules.even_choice import choose_evenly
from clusterctl.run.rules.state import RunState
from clusterctl.validation import node_samples

PROGRESS_FIELDS = node_samples.RankFields(activity=(), status=("step", "progress_age_s"))
_LATEST_BYTES = (16 << 10, 256 << 10)
"""How many bytes at the end of a file are searched for the latest sample: first the smaller, then the larger number."""


def read_last_lines(path: Path, max_bytes: int = 4 << 20) -> list[bytes]:
    """Return the complete lines at the end of a file; empty if there is no such file."""
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            data = os.pread(file.fileno(), min(size, max_bytes), max(0, size - max_bytes))
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")[:-1]
    return lines[1:] if size > max_bytes else lines


def read_sample_lines(run: RunDir, state: RunState, max_bytes: int = 1 << 20) -> dict[str, list[bytes]]:
    """Return the last lines of each node's samples, at most `max_bytes` for each node."""
    return {node: read_last_lines(run.node(node) / SAMPLES_FILE, max_bytes) for node in state.nodes}


def read_latest_activity(
    run: RunDir, node: str, fields: node_samples.RankFields | None = None
) -> ActivitySample | None:
    """Return the latest replicated sample of a node's ranks."""
    return next(node_samples.parse_samples(_read_latest_first(run, node), "activity", fields=fields), None)


def read_latest_health(run: RunDir, node: str) -> HealthSample | None:
    """Return the latest replicated sample of a node's machine and GPUs."""
    return next(node_samples.parse_samples(_read_latest_first(run, node), "health"), None)


def _read_latest_first(run: RunDir, node: str) -> Iterator[bytes]:
    for max_bytes in _LATEST_BYTES:
        yield from reversed(read_last_lines(run.node(node) / SAMPLES_FILE, max_bytes))


def read_latest_activities(
    run: RunDir, state: RunState, fields: node_samples.RankFields | None = None
) -> dict[str, ActivitySample]:
    """Return the latest sample of the ranks of each node that has such samples."""
    found = {node: read_latest_activity(run, node, fields) for node in state.nodes}
    return {node: sample for node, sample in found.items() if sample is not None}


def find_slowest_rank_step(run: RunDir, state: RunState) -> int | None:
    """Return the step that the slowest rank of the newest attempt has reached; `None` if the samples have no steps."""
    newest = [
        s for s in read_latest_activities(run, state, PROGRESS_FIELDS).values() if s.get("attempt") == state.attempt
    ]
    ranks = [rank for sample in newest for rank in (sample.get("ranks") or {}).values()]
    statuses = [status for rank in ranks if (status := rank.get("inside")) is not None]
    return min((step for status in statuses if (step := status.get("step")) is not None), default=None)


_TAIL_BYTES = 96 << 10
_SPEED_WINDOW_S = 120.0
"""The seconds over which a speed is averaged."""
_TREND_LENGTH = 20
"""Number of values in a trend: five minutes with a sample every 15 s."""


class NodeStats:
    """Statistics of the newest samples of one node.

    Args:
        run: The run.
        node: The node.
        max_first: The most samples of each kind that the first `refresh` reads. Validation of a sample takes time.

    Attributes:
        activity: The newest sample of the node's ranks.
        health: The newest sample of the machine and its GPUs.
    """

    def __init__(self, run: RunDir, node: str, max_first: int = _TREND_LENGTH) -> None:
        self._tail, self._max_first = LineTail(run.node(node) / SAMPLES_FILE), max(2, max_first)
        self._steps: dict[int, deque[tuple[float, int]]] = {}
        self._uses: dict[int | None, deque[float]] = {}
        self.activity: ActivitySample | None = None
        self.health: HealthSample | None = None

    def refresh(self) -> None:
        """Read the new samples."""
        is_first = self._tail.skip_to_last_lines(_TAIL_BYTES)
        lines = list(self._tail.read_new_lines())
        active, measured = [[line for line in lines if node_samples.may_be_sample(line, kind)] for kind in _KINDS]
        if is_first:
            active, measured = choose_evenly(active, self._max_first), choose_evenly(measured, self._max_first)
        for activity in node_samples.parse_samples(active, "activity", "m", "ranks"):
            self._add_activity(activity)
        for health in node_samples.parse_samples(measured, "health", "t"):
            self._add_health(health)

    def steps_per_s(self, rank: int) -> float | None:
        """Return the speed of a rank in the last two minutes, in steps per second; `None` if unknown."""
        steps = self._steps.get(rank)
        if not steps or steps[-1][0] <= steps[0][0]:
            return None
        (began, first), (ended, last) = steps[0], steps[-1]
        return (last - first) / (ended - began)

    def list_utilisation(self, gpu: int | None = None) -> Sequence[float]:
        """Return the utilisation of a GPU, or of the CPUs, in percent; the newest value is the last."""
        return tuple(self._uses.get(gpu, ()))

    def _add_activity(self, activity: ActivitySample) -> None:
        if self.activity is not None and self.activity.get("attempt") != activity.get("attempt"):
            self._steps.clear()
        self.activity = activity
        moment = float(activity["m"])
        for rank, known in activity["ranks"].items():
            status = known.get("inside")
            step = None if status is None else status.get("step")
            if step is None:
                continue
            steps = self._steps.setdefault(int(rank), deque())
            if steps and (step < steps[-1][1] or moment < steps[-1][0]):
                steps.clear()
            steps.append((moment, step))
            while len(steps) > 2 and moment - steps[0][0] > _SPEED_WINDOW_S:
                steps.popleft()

    def _add_health(self, health: HealthSample) -> None:
        self.health = health
        values = {gpu["gpu"]: gpu.get("util") for gpu in health.get("gpus") or ()}
        for which, value in (*values.items(), (None, health.get("cpu"))):
            if value is not None:
                self._uses.setdefault(which, deque(maxlen=_TREND_LENGTH)).append(float(value))


Point = tuple[float, float]
"""A time on the head's wall clock, and a value."""

MAX_SAMPLES = 2000
"""The most samples of each kind that are read for all nodes of a run together."""
_MAX_SAMPLES_MANY_NODES = 1000
"""The most samples for more than `MANY_NODES` nodes. A chart then shows only lowest, middle and highest value."""
MANY_NODES = 16
MAX_POINTS = 200
_MIN_POINTS = 5
_CURVE_READ_BYTES = 16 << 10
_KINDS: tuple[node_samples.SampleKind, ...] = ("activity", "health")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Values over time.

    Attributes:
        steps: For each rank: the steps that the rank had reached at each time.
        machines: The values of each node for each measurement: `gpu`, `gpu memory`, `temperature`, `power`, `cpu` and
            `memory`.
    """

    steps: Mapping[int, Sequence[Point]] = field(default_factory=dict)
    machines: Mapping[str, Mapping[str, Sequence[Point]]] = field(default_factory=dict)

    def find_slowest_step(self, began: float | None) -> int | None:
        """Return the last step of the slowest rank, among the ranks with a sample since `began`."""
        last = (points[-1] for points in self.steps.values())
        return min((int(step) for moment, step in last if began is None or moment >= began), default=None)


def read_curves(run: RunDir, nodes: Mapping[str, float]) -> Curves:
    """Return the curves of a run.

    Args:
        run: The run.
        nodes: For each node: the seconds by which its wall clock is ahead of the head's.
    """
    steps: dict[int, list[Point]] = {}
    machines: dict[str, dict[str, list[Point]]] = {}
    budget = MAX_SAMPLES if len(nodes) <= MANY_NODES else _MAX_SAMPLES_MANY_NODES
    max_count = min(MAX_POINTS, max(_MIN_POINTS, budget // max(1, len(nodes))))
    for place, (node, ahead) in enumerate(nodes.items()):
        lines = _choose_lines(run.node(node) / SAMPLES_FILE, max_count, place / len(nodes))
        for moment, reached in filter(None, map(node_samples.parse_rank_steps, lines["activity"])):
            for rank, step in reached:
                steps.setdefault(rank, []).append((moment - ahead, step))
        for moment, measured in filter(None, map(node_samples.parse_host_usage, lines["health"])):
            for what, value in measured.items():
                machines.setdefault(what, {}).setdefault(node, []).append((moment - ahead, value))
    return Curves(
        steps={rank: thin_points(steps[rank]) for rank in sorted(steps)},
        machines={what: {node: thin_points(points) for node, points in by.items()} for what, by in machines.items()},
    )


def thin_points(points: Iterable[Point], max_count: int = MAX_POINTS) -> list[Point]:
    """Return at most `max_count` points, evenly chosen, in the order of time. The last point is always returned."""
    return choose_evenly(sorted(points), max_count)


def _choose_lines(path: Path, max_count: int, phase: float) -> dict[str, list[bytes]]:
    """Return lines of a file by kind of sample, evenly chosen over the time.

    Args:
        path: The file. If the file is long, only pieces are read, without the incomplete lines at the ends of a piece.
        max_count: The most lines of each kind.
        phase: A number from 0 to 1 that shifts the pieces of this node in time against the pieces of other nodes.
    """
    chosen: dict[str, list[bytes]] = {kind: [] for kind in _KINDS}
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= max_count * _CURVE_READ_BYTES:
            lines = read_last_lines(path, size)
            return {
                k: choose_evenly([one for one in lines if node_samples.may_be_sample(one, k)], max_count)
                for k in _KINDS
            }
        places = [int((index + phase) * (size - _CURVE_READ_BYTES) / (max_count - 1)) for index in range(max_count - 1)]
        for place in [*places, size - _CURVE_READ_BYTES]:
            file.seek(place)
            lines = file.read(_CURVE_READ_BYTES).split(b"\n")[1:-1]
            for kind in _KINDS:
                chosen[kind] += [line for line in lines if node_samples.may_be_sample(line, kind)][-1:]
    return chosen


_MAX_MEMORY_AGE_S = 60.0
_MAX_SAMPLE_BYTES = 1 << 20


def find_memory_before_kill(run: RunDir, state: RunState) -> tuple[float, float] | None:
    """Return the last memory use (percent) of a machine before its rank was killed, and its age in seconds.

    Return `None` if the first failure is not a SIGKILL of unknown origin, or if the value is too old.
    """
    cause = state.cause
    if cause is None or (cause.kind, cause.signal) != ("signal", "SIGKILL") or cause.rank not in state.workers:
        return None
    worker = state.workers[cause.rank]
    if worker.exit_analysis is None:
        return None
    ended = worker.exit_analysis.latest + state.clock_ahead_s(worker.node)
    lines = read_last_lines(run.node(worker.node) / SAMPLES_FILE, _MAX_SAMPLE_BYTES)
    for health in node_samples.parse_samples(reversed(lines), "health", "t", "mem"):
        used_percent, age = health["mem"], ended - health["t"]
        if used_percent is not None and age >= 0.0:
            return (used_percent, age) if age <= _MAX_MEMORY_AGE_S else None
    return None
