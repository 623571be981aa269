"""What happened before a view was opened: dated, among the lines of its time, and never as if it happened now."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from clusterctl.render import run_messages
from clusterctl.run.record.state_reader import StateReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clusterctl.logs.line import LogLine
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """How far the journals of a run went at a moment.

    Attributes:
        heads: How many events the controller had written.
        nodes: Node to the number of its newest event.
    """

    heads: int
    nodes: Mapping[str, int] = field(default_factory=dict)


def heard(run: RunDir) -> Heard:
    """Return how far the journals go: a command that begins now tells only of what comes later."""
    reader = StateReader(run)
    heads, _ = reader.refresh()
    known = {**reader.state.retired, **reader.state.nodes}
    return Heard(heads=len(heads), nodes={name: node.seq for name, node in known.items()})


class Past:
    """The old events of a run, until the lines are there among which they are shown."""

    def __init__(self) -> None:
        self._events: list[tuple[float, str]] = []
        self._ends: list[LogLine] = []

    def add(self, moment: float, text: str) -> None:
        """Keep an event, as it was told when it was new; head time."""
        self._events.append((moment, text))

    def add_ends(self, lines: Sequence[LogLine]) -> None:
        """Keep the ends of ranks that are not shown in full."""
        self._ends += lines

    def among(self, history: Sequence[LogLine], most: int) -> Iterator[list[LogLine] | str]:
        """Yield lines and the events between them, in the order of time; events as text, with their date.

        Args:
            history: The lines that are shown; what came before the first of them is left out if they are `most`.
            most: How many lines, and how many events, are shown.
        """
        first = history[0].time if len(history) >= most and history else float("-inf")
        lines = sorted([*history, *(line for line in self._ends if line.time >= first)], key=lambda line: line.time)
        events = sorted((event for event in self._events if event[0] >= first), key=lambda event: event[0])
        shown = 0
        for moment, text in events[len(events) - most :] if len(events) > most else events:
            until = next((n for n in range(shown, len(lines)) if lines[n].time > moment), len(lines))
            if until > shown:
                yield lines[shown:until]
            shown = until
            yield dated(moment, text, time.time())
        if shown < len(lines):
            yield lines[shown:]
        self._events, self._ends = [], []


def dated(moment: float, text: str, now: float) -> str:
    """Return an event of the past: `22:54:58 gpu03: connected again`, with its day where that is another one."""
    then = datetime.fromtimestamp(moment).astimezone()
    day = "" if then.date() == datetime.fromtimestamp(now).astimezone().date() else f"{then:%b} {then.day} "
    return f"{day}{then:%H:%M:%S} {text}"


def present(state: RunState, now: float) -> list[str]:
    """Return what is wrong with a run now (head's wall clock), for whoever has just come."""
    if state.over:
        return []
    away = [run_messages.away_now(node) for node in state.nodes.values() if node.link == "unreachable"]
    troubles = [run_messages.health_news(event) for event in state.troubles.values()]
    # Of a run that is being ended it is known for how long nothing had moved then.
    stall = state.stall if state.stall is None or state.reason is not None else state.stall.at_time(now)
    hints = [] if stall is None else [run_messages.stall_line(stall), *run_messages.stall_hints(state.run, stall.phase)]
    return [*away, *troubles, *hints]
