"""What a node told lately: how fast its ranks go, and how busy its GPUs and processors were."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import run_files
from clusterctl.validation import samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.agent.protocol.sample_types import ActivitySample, HealthSample
    from clusterctl.run.record.rundir import RunDir

_TAIL = 96 << 10
_PACE_S = 120.0
"""Seconds over which a speed is told."""
_TREND = 20
"""Values of a trend: five minutes of samples that come every 15 s."""


class Recent:
    """The newest samples of one node, taken in as they come.

    Args:
        run: The run.
        node: Its node.
        first: How many samples of each kind are read of those that are there already: to judge one takes time.

    Attributes:
        activity: The newest sample of its ranks.
        health: The newest sample of machine and GPUs.
    """

    def __init__(self, run: RunDir, node: str, first: int = _TREND) -> None:
        self._path, self._first = run.node(node) / run_files.SAMPLES_FILE, max(2, first)
        self._offset = 0
        self._steps: dict[int, deque[tuple[float, int]]] = {}
        self._uses: dict[int | None, deque[float]] = {}
        self.activity: ActivitySample | None = None
        self.health: HealthSample | None = None

    def refresh(self) -> None:
        """Take in what is new."""
        begun, lines = self._offset > 0, self._new_lines()
        active, measured = (
            [line for line in lines if samples.may_be_sample(line, kind)] for kind in ("activity", "health")
        )
        for activity in samples.parse_samples(active if begun else self._few(active), "activity", "m", "ranks"):
            self._active(activity)
        for health in samples.parse_samples(measured if begun else self._few(measured), "health", "t"):
            self._measured(health)

    def _few(self, lines: list[bytes]) -> list[bytes]:
        if len(lines) <= self._first:
            return lines
        last = len(lines) - 1
        return [lines[round(place * last / (self._first - 1))] for place in range(self._first)]

    def pace(self, rank: int) -> float | None:
        """Return how many steps a second a rank made in the last minutes; `None` where that is not known."""
        steps = self._steps.get(rank)
        if not steps or steps[-1][0] <= steps[0][0]:
            return None
        (began, first), (last, step) = steps[0], steps[-1]
        return (step - first) / (last - began)

    def trend(self, gpu: int | None = None) -> Sequence[float]:
        """Return how busy a GPU was, or without one the processors: percent, the newest last."""
        return tuple(self._uses.get(gpu, ()))

    def _new_lines(self) -> list[bytes]:
        """Return whole lines that were not seen yet; of a file that was never looked at those at its end."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                begin = self._offset if self._offset else max(0, size - _TAIL)
                file.seek(begin)
                data = file.read(size - begin)
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        torn = data.find(b"\n") + 1 if begin and not self._offset else 0
        self._offset = begin + whole
        return data[torn:whole].split(b"\n")[:-1]

    def _active(self, activity: ActivitySample) -> None:
        if self.activity is not None and self.activity.get("attempt") != activity.get("attempt"):
            self._steps.clear()
        self.activity = activity
        for rank, known in activity["ranks"].items():
            inside = known.get("inside")
            step = None if inside is None else inside.get("step")
            if step is not None:
                self._stepped(int(rank), float(activity["m"]), step)

    def _stepped(self, rank: int, moment: float, step: int) -> None:
        steps = self._steps.setdefault(rank, deque())
        if steps and (step < steps[-1][1] or moment < steps[-1][0]):
            steps.clear()
        steps.append((moment, step))
        while len(steps) > 2 and moment - steps[0][0] > _PACE_S:
            steps.popleft()

    def _measured(self, health: HealthSample) -> None:
        self.health = health
        values = {gpu["gpu"]: gpu.get("util") for gpu in health.get("gpus") or ()}
        for which, value in (*values.items(), (None, health.get("cpu"))):
            if value is not None:
                self._uses.setdefault(which, deque(maxlen=_TREND)).append(float(value))
