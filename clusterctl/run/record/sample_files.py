"""The newest samples of a run, from the ends of their replicas.

What a node told lately: how fast its ranks go, and how busy its GPUs and processors were.

What ranks and machines did over a whole run, from the nodes' samples: few points, in bounded time.

How full the memory of a node was shortly before one of its ranks was killed, as far as its samples tell.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from clusterctl.agent.protocol import run_files
from clusterctl.agent.protocol.record_types import ActivitySample, HealthSample
from clusterctl.agent.protocol.run_files import SAMPLES_FILE
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.state import RunState
from clusterctl.validation import samples

_MAX_LOOK_BACK_BYTES = 256 * 1024
_READ_BYTES = 16 * 1024


def read_latest_activity(run: RunDir, node: str) -> ActivitySample | None:
    """Return the newest sample of its ranks that was replicated from a node."""
    return next(samples.parse_samples(_read_newest_first(run, node), "activity"), None)


def read_latest_health(run: RunDir, node: str) -> HealthSample | None:
    """Return the newest sample of machine and GPUs that was replicated from a node."""
    return next(samples.parse_samples(_read_newest_first(run, node), "health"), None)


def _read_newest_first(run: RunDir, node: str) -> Iterator[bytes]:
    """Give the lines at the end of a node's samples, the newest first; mostly that is all that is looked at."""
    with _open_read_only(f"{run.path}/nodes/{node}/{run_files.SAMPLES_FILE}") as fd:
        end = 0 if fd is None else os.fstat(fd).st_size
        begin_limit, torn = max(0, end - _MAX_LOOK_BACK_BYTES), b""
        while fd is not None and end > begin_limit:
            begin = max(begin_limit, end - _READ_BYTES)
            first, *lines = (os.pread(fd, end - begin, begin) + torn).split(b"\n")
            yield from reversed(lines)
            end, torn = begin, first
        yield torn


@contextlib.contextmanager
def _open_read_only(path: Path | str) -> Iterator[int | None]:
    """Give a file to read from: of a run there are hundreds, and what `open` does more is of no use here."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def find_latest_step(run: RunDir, state: RunState) -> int | None:
    """Return the step that the slowest rank of the newest attempt had reached, as far as the samples tell."""
    newest = [read_latest_activity(run, node) for node in state.nodes]
    ranks = [
        r
        for s in newest
        if s is not None and s.get("attempt") == state.attempt
        for r in (s.get("ranks") or {}).values()
    ]
    reports = [inside for rank in ranks if (inside := rank.get("inside")) is not None]
    return min((step for inside in reports if (step := inside.get("step")) is not None), default=None)


def read_newest_lines(run: RunDir, state: RunState, max_bytes: int = 1 << 20) -> dict[str, list[bytes]]:
    """Return the newest lines of each node's samples, so many bytes at most."""
    return {node: read_last_lines(run.node(node) / run_files.SAMPLES_FILE, max_bytes) for node in state.nodes}


def read_last_lines(path: Path, max_bytes: int = 4 << 20) -> list[bytes]:
    """Return the whole lines at the end of a file; none where there is no such file."""
    return read_last_bytes(path, max_bytes).split(b"\n")[:-1]


def read_last_bytes(path: Path, max_bytes: int = 4 << 20) -> bytes:
    """Return the end of a file, of whole lines; nothing where there is no such file."""
    with _open_read_only(path) as fd:
        size = 0 if fd is None else os.fstat(fd).st_size
        data = b"" if fd is None else os.pread(fd, min(size, max_bytes), max(0, size - max_bytes))
    begin = data.find(b"\n") + 1 if size > max_bytes else 0
    return data[begin : data.rfind(b"\n") + 1]


def read_newest_activity(run: RunDir, state: RunState) -> dict[str, ActivitySample]:
    """Return the newest sample of ranks of each node that has told one."""
    found = {node: read_latest_activity(run, node) for node in state.nodes}
    return {node: sample for node, sample in found.items() if sample is not None}


_TAIL_BYTES = 96 << 10
_SPEED_WINDOW_S = 120.0
"""Seconds over which a speed is told."""
_TREND_LENGTH = 20
"""Values of a trend: five minutes of samples that come every 15 s."""


class NodeStats:
    """The newest samples of one node, taken in as they come.

    Args:
        run: The run.
        node: Its node.
        first: How many samples of each kind are read of those that are there already: to judge one takes time.

    Attributes:
        activity: The newest sample of its ranks.
        health: The newest sample of machine and GPUs.
    """

    def __init__(self, run: RunDir, node: str, max_first: int = _TREND_LENGTH) -> None:
        self._path, self._first = run.node(node) / run_files.SAMPLES_FILE, max(2, max_first)
        self._offset = 0
        self._steps: dict[int, deque[tuple[float, int]]] = {}
        self._uses: dict[int | None, deque[float]] = {}
        self.activity: ActivitySample | None = None
        self.health: HealthSample | None = None

    def refresh(self) -> None:
        """Take in what is new."""
        has_read, lines = self._offset > 0, self._read_new_lines()
        active, measured = (
            [line for line in lines if samples.may_be_sample(line, kind)] for kind in ("activity", "health")
        )
        for activity in samples.parse_samples(
            active if has_read else self._choose_evenly(active), "activity", "m", "ranks"
        ):
            self._add_activity(activity)
        for health in samples.parse_samples(measured if has_read else self._choose_evenly(measured), "health", "t"):
            self._add_health(health)

    def _choose_evenly(self, lines: list[bytes]) -> list[bytes]:
        if len(lines) <= self._first:
            return lines
        last = len(lines) - 1
        return [lines[round(place * last / (self._first - 1))] for place in range(self._first)]

    def steps_per_s(self, rank: int) -> float | None:
        """Return how many steps a second a rank made in the last minutes; `None` where that is not known."""
        steps = self._steps.get(rank)
        if not steps or steps[-1][0] <= steps[0][0]:
            return None
        (began, max_first), (last, step) = steps[0], steps[-1]
        return (step - max_first) / (last - began)

    def list_utilisation(self, gpu: int | None = None) -> Sequence[float]:
        """Return how busy a GPU was, or without one the processors: percent, the newest last."""
        return tuple(self._uses.get(gpu, ()))

    def _read_new_lines(self) -> list[bytes]:
        """Return whole lines that were not seen yet; of a file that was never looked at those at its end."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                begin = self._offset if self._offset else max(0, size - _TAIL_BYTES)
                file.seek(begin)
                data = file.read(size - begin)
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        torn = data.find(b"\n") + 1 if begin and not self._offset else 0
        self._offset = begin + whole
        return data[torn:whole].split(b"\n")[:-1]

    def _add_activity(self, activity: ActivitySample) -> None:
        if self.activity is not None and self.activity.get("attempt") != activity.get("attempt"):
            self._steps.clear()
        self.activity = activity
        for rank, known in activity["ranks"].items():
            inside = known.get("inside")
            step = None if inside is None else inside.get("step")
            if step is not None:
                self._add_step(int(rank), float(activity["m"]), step)

    def _add_step(self, rank: int, moment: float, step: int) -> None:
        steps = self._steps.setdefault(rank, deque())
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


T = TypeVar("T")

Point = tuple[float, float]
"""A wall clock time of the head, and a value."""

MAX_SAMPLES = 2000
"""Samples of each kind that are read of a run, of all its nodes together."""
_MAX_SAMPLES_MANY_NODES = 1000
"""The same where there are so many nodes that a picture shows the lowest, the middle and the highest of them alone."""
MANY_NODES = 16
MAX_POINTS = 200
_MIN_POINTS = 5
_CURVE_READ_BYTES = 16 << 10
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

    def find_slowest_step(self, began: float | None) -> int | None:
        """Return the least step that ranks had reached when they were last seen, of those that were seen since then."""
        last = (points[-1] for points in self.steps.values())
        return min((int(step) for moment, step in last if began is None or moment >= began), default=None)


def read_curves(run: RunDir, nodes: Mapping[str, float]) -> Curves:
    """Return the curves of a run.

    Args:
        run: Which.
        nodes: Those that took part, with the seconds by which their wall clocks are ahead of the head's.
    """
    steps: dict[int, list[Point]] = {}
    machines: dict[str, dict[str, list[Point]]] = {}
    budget = MAX_SAMPLES if len(nodes) <= MANY_NODES else _MAX_SAMPLES_MANY_NODES
    max_count = min(MAX_POINTS, max(_MIN_POINTS, budget // max(1, len(nodes))))
    for place, (node, ahead) in enumerate(nodes.items()):
        lines = _choose_lines(run.node(node) / run_files.SAMPLES_FILE, max_count, place / len(nodes))
        for moment, reached in filter(None, map(samples.parse_steps, lines["activity"])):
            for rank, step in reached:
                steps.setdefault(rank, []).append((moment - ahead, step))
        for moment, measured in filter(None, map(samples.parse_host_usage, lines["health"])):
            for what, value in measured.items():
                machines.setdefault(what, {}).setdefault(node, []).append((moment - ahead, value))
    return Curves(
        steps={rank: thin_points(steps[rank]) for rank in sorted(steps)},
        machines={what: {node: thin_points(points) for node, points in by.items()} for what, by in machines.items()},
    )


def thin_points(points: Iterable[Point], max_count: int = MAX_POINTS) -> list[Point]:
    """Return at most so many of the points, in the order of time, evenly chosen; the last one is among them."""
    return _choose_evenly(sorted(points), max_count)


def _choose_lines(path: Path, max_count: int, phase: float) -> dict[str, list[bytes]]:
    """Return lines of a file by kind of sample, evenly chosen over its time, at most so many of each.

    Args:
        path: The file. Of a long one pieces are read; the first and the last line of a piece may be cut, and are then
            no samples.
        max_count: Of each kind.
        phase: From 0 to 1: where the pieces of this node lie between those of the others.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= max_count * _CURVE_READ_BYTES:
            file.seek(0)
            lines = file.read().split(b"\n")
            return {
                kind: _choose_evenly([line for line in lines if samples.may_be_sample(line, kind)], max_count)
                for kind in _KINDS
            }
        places = [int((index + phase) * (size - _CURVE_READ_BYTES) / (max_count - 1)) for index in range(max_count - 1)]
        chosen: dict[str, list[bytes]] = {kind: [] for kind in _KINDS}
        for place in [*places, size - _CURVE_READ_BYTES]:
            file.seek(place)
            lines = file.read(_CURVE_READ_BYTES).split(b"\n")[1:-1]
            for kind in _KINDS:
                chosen[kind] += [line for line in lines if samples.may_be_sample(line, kind)][-1:]
        return chosen
    return {kind: [] for kind in _KINDS}


def _choose_evenly(items: Sequence[T], max_count: int) -> list[T]:
    """Return at most so many, evenly chosen; the first and the last are among them."""
    if len(items) <= max_count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (max_count - 1))] for index in range(max_count)]


_MAX_MEMORY_AGE_S = 60.0
_MAX_SAMPLE_BYTES = 1 << 20


def find_memory_before_kill(run: RunDir, state: RunState) -> tuple[float, float] | None:
    """Return how full it was when it was last measured, percent, and how many seconds before the rank ended.

    Nothing where what failed first was not killed by a SIGKILL of unknown origin, or nobody had measured lately.
    """
    cause = state.cause
    if cause is None or (cause.kind, cause.signal) != ("signal", "SIGKILL") or cause.rank not in state.workers:
        return None
    worker = state.workers[cause.rank]
    if worker.exit_analysis is None:
        return None
    ended = worker.exit_analysis.latest + state.ahead(worker.node)
    lines = read_last_lines(run.node(worker.node) / SAMPLES_FILE, _MAX_SAMPLE_BYTES)
    for health in samples.parse_samples(reversed(lines), "health", "t", "mem"):
        used_percent, age = health["mem"], ended - health["t"]
        if used_percent is not None and age >= 0.0:
            return (used_percent, age) if age <= _MAX_MEMORY_AGE_S else None
    return None
