"""Reads how long each step of the first start of a run took, and when the ranks wrote their first output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.agent.protocol.run_files import INDEX_RECORD, format_index_path
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import StateReader, TimedControllerEvent
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunState

_LAST_STEP = "start"
FIRST_OUTPUT = "first output"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The duration of a step of the start.

    Attributes:
        seconds: The duration of the whole step.
        nodes: The seconds until each node had finished the step. Nodes that never finished the step are absent.
        parts: For each node: the part of the step that took longest, and the seconds that it took.
    """

    name: str
    seconds: float
    nodes: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def slowest(self) -> str | None:
        """The slowest node."""
        return max(self.nodes, key=lambda node: self.nodes[node], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """The steps of a start.

    Attributes:
        seconds: The time from the creation of the run until its workers start or the start fails.
    """

    seconds: float
    steps: tuple[StepTime, ...]


def read_start_times(run: RunDir) -> StartTimes | None:
    """Return the steps of a run's first start so far; `None` before the first step."""
    steps: list[StepTime] = []
    moments: list[float] = []
    began: list[float] = []

    def add_event(news: TimedControllerEvent) -> None:
        moment, event = news
        if steps and steps[-1].name == _LAST_STEP:
            return
        moments.append(moment)
        if isinstance(event, controller_events.AttemptStarted):
            began.append(moment)
        elif isinstance(event, controller_events.StartStepProgress) and event.ended:
            parts = {node: (str(what), float(seconds)) for node, (what, seconds) in event.parts.items()}
            steps.append(StepTime(name=event.name, seconds=event.seconds, nodes=event.nodes, parts=parts))

    reader = StateReader(run)
    reader.apply_new_controller_events(add_event)
    if not steps:
        return None
    if began and (first := _find_first_output(run, reader.state, began[0])):
        steps.append(StepTime(name=FIRST_OUTPUT, seconds=max(first.values()), nodes=first))
    return StartTimes(seconds=moments[-1] - moments[0], steps=tuple(steps))


def _find_first_output(run: RunDir, state: RunState, began: float) -> dict[str, float]:
    """Return, for each node, the seconds from the start of the workers to the first output of any of its ranks."""
    found: dict[str, float] = {}
    for attempt, node, ranks in state.placements:
        if attempt == 0:
            times = [_read_first_record_time(run.node(node) / format_index_path(0, rank)) for rank in ranks]
            known = [moment - state.clock_ahead_s(node) - began for moment in times if moment is not None]
            found |= {node: round(max(0.0, min(known)), 3)} if known else {}
    return found


def _read_first_record_time(path: Path) -> float | None:
    try:
        with path.open("rb") as file:
            data = file.read(INDEX_RECORD.size)
    except OSError:
        return None
    if len(data) < INDEX_RECORD.size:
        return None
    size, moment = INDEX_RECORD.unpack(data)
    # The first records of an index are zeros if their output was deleted.
    return float(moment) if size else None
