"""Reads a run directory as it grows: what is new since the last look, and the state that follows from it.

A run that has ended, in outline: what lists show of it, in a small file, so that many of them cost next to nothing.

The file goes with the journal of the controller as it was; where that has grown since, the outline counts for nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import events, run_files
from clusterctl.run.rules import controller_events as head
from clusterctl.run.rules.outcome import find_final_cause
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, cause_from_json, cause_to_json
from clusterctl.run.rules.state_updates import StateBuilder
from clusterctl.validation import journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from clusterctl.run.record.rundir import RunDir


NodeNews = tuple[str, events.Stamp, events.Event]
ControllerNews = tuple[float, head.ControllerEvent]

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, LookupError, RecursionError)
"""What a line that is none of ours may raise, wherever it is taken apart; a torn one is among them."""
_QUOTED = 200


class LineTail:
    """The whole lines that a file has gained since the last look; a torn last line waits for its end."""

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self._offset = 0

    def end(self) -> int:
        """Return how long the file is now."""
        try:
            return os.stat(self._path).st_size
        except FileNotFoundError:
            return 0

    def read(self, end: int | None = None) -> Iterator[bytes]:
        """Yield the new lines that begin before `end`, as they are read piece by piece; default all."""
        limit = self.end() if end is None else end
        if limit <= self._offset:
            return
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if self._offset >= limit or not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line[:-1]


class StateReader:
    """Folds a run directory. `state` is what the last `refresh` made of it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._head = LineTail(run.events)
        self._nodes: dict[str, LineTail] = {}
        self._named: set[str] = set()
        self.state = RunState()

    def refresh(self) -> tuple[list[ControllerNews], list[NodeNews]]:
        """Take in what is new; return it, the controller's events and the nodes'."""
        heads: list[ControllerNews] = []
        nodes: list[NodeNews] = []
        self.apply_new_events(heads.append, nodes.append)
        return heads, nodes

    def apply_new_events(
        self,
        head_news: Callable[[ControllerNews], object] = lambda _: None,
        node_news: Callable[[NodeNews], object] = lambda _: None,
    ) -> None:
        """Take in what is new, and hand each event on; nothing of it is kept but the state.

        The nodes' journals are taken in last, up to where they went before the controller's was read: an attempt is
        always known before what happened in it. While an event is handed on, `state` is what it led to, for that long:
        its tables go on changing.
        """
        ends = self._find_ends()
        errors: dict[str, Exception] = {}
        self.apply_new_controller_events(head_news)
        builder = StateBuilder(self.state)
        for node, end in ends.items():
            for line in self._nodes[node].read(end):
                try:
                    entry = journal.parse_line(line)
                    if entry is not None:
                        builder.add_node_event(node, *entry)
                        self.state = builder.state
                        node_news((node, *entry))
                except _UNREADABLE as error:
                    errors.setdefault(f"nodes/{node}/{run_files.JOURNAL_FILE}", error)
        self.state = builder.build()
        for file, why in errors.items():
            self._add_unreadable(file, why)

    def apply_new_controller_events(self, head_news: Callable[[ControllerNews], object] = lambda _: None) -> None:
        """Take in what the controller alone has told since the last look."""
        builder = StateBuilder(self.state)
        errors: Exception | None = None
        for line in self._head.read():
            try:
                decoded = head.decode(line)
                if decoded is not None:
                    _, time, event = decoded
                    builder.add_controller_event(time, event)
                    self.state = builder.state
                    head_news((time, event))
            except _UNREADABLE as error:
                errors = errors or error
        self.state = builder.build()
        if errors is not None:
            self._add_unreadable(self._run.events.name, errors)

    def _add_unreadable(self, file: str, error: Exception) -> None:
        """Name the first line of a file that cannot be read."""
        if file not in self._named:
            self._named.add(file)
            self.state = replace(
                self.state, unreadable_lines=(*self.state.unreadable_lines, f"{file}: {str(error)[:_QUOTED]}")
            )

    def _find_ends(self) -> dict[str, int]:
        folder = f"{self._run.path}/nodes"
        for node in _list_node_names(folder):
            if node not in self._nodes:
                self._nodes[node] = LineTail(f"{folder}/{node}/{run_files.JOURNAL_FILE}")
        return {node: tail.end() for node, tail in self._nodes.items()}


def _list_node_names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def load_state(run: RunDir) -> RunState:
    """Return the state of a run from its files alone."""
    reader = StateReader(run)
    reader.apply_new_events()
    return reader.state


def load_controller_state(run: RunDir) -> RunState:
    """Return what the controller alone told of a run: name and file, who takes part, and whether it is over."""
    reader = StateReader(run)
    reader.apply_new_controller_events()
    return reader.state


_SUMMARY_FIELDS = ("run", "name", "path", "attempt", "world_size", "created", "ended", "exit_code")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What lists show of a run that has ended.

    Attributes:
        state: Its state without workers, and of its nodes the names alone; what ended it stands as `no_exit`.
        step: What its slowest rank had reached, or `None`.
    """

    state: RunState
    step: int | None = None


def encode_summary(state: RunState, step: int | None, events: Path) -> bytes:
    """Return the file of a run that has ended; `events` is the journal of its controller."""
    value = {field: getattr(state, field) for field in _SUMMARY_FIELDS}
    value |= {"phase": state.phase.value, "nodes": list(state.nodes), "step": step, "events": os.stat(events).st_size}
    value["remaining"] = list(state.remaining)
    value["cause"] = cause_to_json(find_final_cause(state))
    return json.dumps(value).encode()


def read_summary(path: Path, events: Path) -> RunSummary | None:
    """Return the summary of a run, or `None` if there is none or it is out of date."""
    try:
        value = json.loads(path.read_bytes())
        if value["events"] != os.stat(events).st_size:
            return None
        nodes = {name: NodeState(node=name, node_rank=place) for place, name in enumerate(value["nodes"])}
        fields = {field: value[field] for field in _SUMMARY_FIELDS}
        cause = cause_from_json(value["cause"])
        remaining = tuple(value["remaining"])
        state = RunState(
            phase=RunPhase(value["phase"]), nodes=nodes, external_cause=cause, remaining=remaining, **fields
        )
        return RunSummary(state=state, step=value["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
