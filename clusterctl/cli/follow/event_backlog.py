"""Merges the events of a run before `attach` with the output lines of the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from clusterctl.logs.log_line import LogLine
from clusterctl.render import run_messages
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import StateReader
from clusterctl.run.rules.state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPosition:
    """A position in the journals of a run: the number of the last event in each journal.

    Attributes:
        controller_event_count: The number of events of the controller.
        last_seq_by_node: The sequence number of the newest event of each node.
    """

    controller_event_count: int
    last_seq_by_node: Mapping[str, int] = field(default_factory=dict)


def read_journal_position(run: RunDir) -> JournalPosition:
    """Return the position of the newest events. A screen with this position shows only later events."""
    reader = StateReader(run)
    new_controller_events, _ = reader.refresh()
    known = {**reader.state.retired, **reader.state.nodes}
    return JournalPosition(
        controller_event_count=len(new_controller_events),
        last_seq_by_node={name: node.seq for name, node in known.items()},
    )


class EventBacklog:
    """Collects old events of a run until the output lines of the same time are read."""

    def __init__(self) -> None:
        self._events: list[tuple[float, str]] = []
        self._failure_tails: list[LogLine] = []

    def add_event(self, moment: float, text: str) -> None:
        """Add the message of an event, with its time on the clock of the head."""
        self._events.append((moment, text))

    def add_failure_tails(self, lines: Sequence[LogLine]) -> None:
        """Add the last output lines of failed ranks whose output is otherwise not shown."""
        self._failure_tails += lines

    def merge_with_output(self, lines_to_show: Sequence[LogLine], limit: int) -> Iterator[list[LogLine] | str]:
        """Yield lists of output lines and, as texts with dates, the events between these lines, in the order of time.

        Args:
            lines_to_show: The output lines. If there are at least `limit` lines, events before the first line are
                omitted.
            limit: The largest number of events, and of output lines.
        """
        first = lines_to_show[0].time if len(lines_to_show) >= limit and lines_to_show else float("-inf")
        lines = sorted(
            [*lines_to_show, *(line for line in self._failure_tails if line.time >= first)], key=lambda line: line.time
        )
        events = sorted((event for event in self._events if event[0] >= first), key=lambda event: event[0])
        shown = 0
        for moment, text in events[len(events) - limit :] if len(events) > limit else events:
            until = next((n for n in range(shown, len(lines)) if lines[n].time > moment), len(lines))
            if until > shown:
                yield lines[shown:until]
            shown = until
            yield format_event_with_time(moment, text, time.time())
        if shown < len(lines):
            yield lines[shown:]
        self._events, self._failure_tails = [], []


def format_event_with_time(moment: float, text: str, now: float) -> str:
    """Return an event with its time, as in `22:54:58 gpu03: connected again`; an event of another day has a date."""
    then = datetime.fromtimestamp(moment).astimezone()
    day = "" if then.date() == datetime.fromtimestamp(now).astimezone().date() else f"{then:%b} {then.day} "
    return f"{day}{then:%H:%M:%S} {text}"


def list_current_problems(state: RunState, now: float) -> list[str]:
    """Return messages about the current problems of a run; `now` is the wall clock of the head."""
    if state.is_over:
        return []
    away = [f"{node.node}: {node.describe_silence()}" for node in state.nodes.values() if node.link == "unreachable"]
    troubles = [run_messages.health_message(event) for event in state.troubles.values()]
    # While a run is being stopped, the age of its stall does not grow.
    stall = state.stall if state.stall is None or state.reason is not None else state.stall.at_time(now)
    hints = [] if stall is None else [run_messages.stall_line(stall), *run_messages.stall_hints(state.run, stall.phase)]
    return [*away, *troubles, *hints]
