"""Collects events in the trace format of Chrome, which ui.perfetto.dev opens. Pure.

A track of the trace is one row of the screen, and a group holds the tracks of a node or rank. Times are seconds, also
before the origin of the trace; the file has microseconds. The Trace Event Format calls a group process, and a track
thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

TraceEvent = dict[str, Any]


class TraceBuilder:
    """Collects the events of a trace.

    Args:
        origin: The time (seconds, any clock) at which the trace begins.

    Attributes:
        events: The events so far, in the order of the calls.
    """

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._tracks: dict[tuple[str, str], int] = {}
        self._groups: dict[str, int] = {}
        self._open: dict[tuple[str, str], tuple[str, float, dict[str, Any]]] = {}
        self._changed: dict[tuple[str, str], float] = {}
        self.events: list[TraceEvent] = []

    def add_slice(self, group: str, track: str, name: str, began: float, ended: float, **values: Any) -> None:
        """Add a period; `values` are shown for the selected slice."""
        duration_us = max(0.0, ended - began) * 1e6
        self._add("X", group, track, name, began, dur=round(duration_us, 3), args=values)

    def add_instant(self, group: str, track: str, name: str, time: float) -> None:
        """Add an event without a duration."""
        self._add("i", group, track, name, time, s="t")

    def add_counter(self, group: str, name: str, time: float, value: float) -> None:
        """Add a value of a curve, which is a track of its own."""
        pid = self._find_group(group)
        self.events.append({"ph": "C", "pid": pid, "name": name, "ts": self._convert(time), "args": {"value": value}})

    def change_slice(self, group: str, track: str, time: float, name: str | None = None, **values: Any) -> None:
        """End the open slice of a track, and begin the slice `name` unless it is `None`. The slices never overlap.

        Without `name`, `values` are added to the slice that ends.
        """
        time = max(time, self._changed.get((group, track), time))
        self._changed[group, track] = time
        if (last := self._open.pop((group, track), None)) is not None:
            added = values if name is None else {}
            self.add_slice(group, track, last[0], last[1], time, **last[2], **added)
        if name is not None:
            self._open[group, track] = (name, time, values)

    def end_slices(self, time: float) -> None:
        """End all open slices."""
        for group, track in list(self._open):
            self.change_slice(group, track, time)

    def _add(self, phase: str, group: str, track: str, name: str, time: float, **fields: Any) -> None:
        pid = self._find_group(group)
        if (group, track) not in self._tracks:
            tid = self._tracks[group, track] = len(self._tracks) + 1
            self.events += build_names(pid, tid, "thread", track)
        tid = self._tracks[group, track]
        self.events.append({"ph": phase, "pid": pid, "tid": tid, "name": name, "ts": self._convert(time), **fields})

    def _find_group(self, group: str) -> int:
        if group not in self._groups:
            self._groups[group] = len(self._groups) + 1
            self.events += build_names(self._groups[group], 0, "process", group)
        return self._groups[group]

    def _convert(self, time: float) -> float:
        return round((time - self._origin) * 1e6, 3)


def build_names(pid: int, tid: int, kind: str, name: str) -> list[TraceEvent]:
    """Return the events that name a group (`kind` is `process`) or a track (`thread`), and place it by its number."""
    facts = {f"{kind}_name": {"name": name}, f"{kind}_sort_index": {"sort_index": tid if kind == "thread" else pid}}
    return [{"ph": "M", "pid": pid, "tid": tid, "name": what, "args": value} for what, value in facts.items()]


def encode_trace(events: Sequence[TraceEvent]) -> str:
    """Return the content of a trace file, in ASCII, with one event per line."""
    return '{"traceEvents":[\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n"
