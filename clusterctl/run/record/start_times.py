"""Where the time of a run's first start went: its steps, how long each node took, and when output came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.run_files import INDEX_RECORD, format_index_path
from clusterctl.run.record.state_reader import StateReader
from clusterctl.run.rules import controller_events

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.record.state_reader import ControllerNews
    from clusterctl.run.rules.state import RunState

_LAST_STEP = "start"
FIRST_OUTPUT = "first output"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long a step took.

    Attributes:
        seconds: Of all nodes together, from its beginning.
        nodes: Until each was through; those that never were are not in it.
        parts: What a node was waited for longest, and for how long.
    """

    name: str
    seconds: float
    nodes: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def slowest(self) -> str | None:
        """The node that took longest."""
        return max(self.nodes, key=lambda node: self.nodes[node], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """A start. `seconds` are from the run's making until its workers were started, or until it failed."""

    seconds: float
    steps: tuple[StepTime, ...]


def read_start_times(run: RunDir) -> StartTimes | None:
    """Return where the time of a run's first start went, as far as it has come; `None` where nothing is known."""
    steps: list[StepTime] = []
    moments: list[float] = []
    began: list[float] = []

    def add_event(news: ControllerNews) -> None:
        moment, event = news
        if steps and steps[-1].name == _LAST_STEP:
            return
        moments.append(moment)
        if isinstance(event, controller_events.Attempt):
            began.append(moment)
        elif isinstance(event, controller_events.Phase) and event.ended:
            steps.append(_step_time(event))

    reader = StateReader(run)
    reader.apply_new_controller_events(add_event)
    if not steps:
        return None
    if began and (first := _find_first_output(run, reader.state, began[0])):
        steps.append(StepTime(name=FIRST_OUTPUT, seconds=max(first.values()), nodes=first))
    return StartTimes(seconds=moments[-1] - moments[0], steps=tuple(steps))


def _step_time(event: controller_events.Phase) -> StepTime:
    parts = {node: (str(what), float(seconds)) for node, (what, seconds) in event.parts.items()}
    return StepTime(name=event.name, seconds=event.seconds, nodes=event.nodes, parts=parts)


def _find_first_output(run: RunDir, state: RunState, began: float) -> dict[str, float]:
    """Return after how long each node's first rank wrote something, from the moment at which workers were started."""
    found: dict[str, float] = {}
    for attempt, node, ranks in state.placements:
        if attempt == 0:
            times = [_read_first_record_time(run.node(node) / format_index_path(0, rank)) for rank in ranks]
            known = [moment - state.ahead(node) - began for moment in times if moment is not None]
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
    # The front of an index is given up with the output that it is about.
    return float(moment) if size else None
