"""Reads a run directory as it grows: what is new since the last look, and the state that follows from it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import events, run_files
from clusterctl.run.rules import controller_events as head
from clusterctl.run.rules.state import RunState
from clusterctl.run.rules.state_updates import StateBuilder, apply_controller_event
from clusterctl.validation import journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from clusterctl.run.record.rundir import RunDir

NodeNews = tuple[str, events.Stamp, events.Event]
HeadNews = tuple[float, head.ControllerEvent]

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

    def refresh(self) -> tuple[list[HeadNews], list[NodeNews]]:
        """Take in what is new; return it, the controller's events and the nodes'."""
        heads: list[HeadNews] = []
        nodes: list[NodeNews] = []
        self.take_in(heads.append, nodes.append)
        return heads, nodes

    def take_in(
        self,
        head_news: Callable[[HeadNews], object] = lambda _: None,
        node_news: Callable[[NodeNews], object] = lambda _: None,
    ) -> None:
        """Take in what is new, and hand each event on; nothing of it is kept but the state.

        The nodes' journals are taken in last, up to where they went before the controller's was read: an attempt is
        always known before what happened in it. While an event is handed on, `state` is what it led to, for that long:
        its tables go on changing.
        """
        ends = self._ends()
        unread: dict[str, Exception] = {}
        self.take_in_head(head_news)
        folding = StateBuilder(self.state)
        for node, end in ends.items():
            for line in self._nodes[node].read(end):
                try:
                    told = journal.parse_line(line)
                    if told is not None:
                        folding.add_node_event(node, *told)
                        self.state = folding.state
                        node_news((node, *told))
                except _UNREADABLE as error:
                    unread.setdefault(f"nodes/{node}/{run_files.JOURNAL_FILE}", error)
        self.state = folding.build()
        for file, why in unread.items():
            self._unread(file, why)

    def take_in_head(self, head_news: Callable[[HeadNews], object]) -> None:
        """Take in what the controller alone has told since the last look."""
        folding = StateBuilder(self.state)
        unread: Exception | None = None
        for line in self._head.read():
            try:
                decoded = head.decode(line)
                if decoded is not None:
                    _, time, event = decoded
                    folding.add_controller_event(time, event)
                    self.state = folding.state
                    head_news((time, event))
            except _UNREADABLE as error:
                unread = unread or error
        self.state = folding.build()
        if unread is not None:
            self._unread(self._run.events.name, unread)

    def _unread(self, file: str, error: Exception) -> None:
        """Name the first line of a file that cannot be read."""
        if file not in self._named:
            self._named.add(file)
            self.state = replace(
                self.state, unreadable_lines=(*self.state.unreadable_lines, f"{file}: {str(error)[:_QUOTED]}")
            )

    def _ends(self) -> dict[str, int]:
        folder = f"{self._run.path}/nodes"
        for node in _names(folder):
            if node not in self._nodes:
                self._nodes[node] = LineTail(f"{folder}/{node}/{run_files.JOURNAL_FILE}")
        return {node: tail.end() for node, tail in self._nodes.items()}


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def load_state(run: RunDir) -> RunState:
    """Return the state of a run from its files alone."""
    reader = StateReader(run)
    reader.take_in()
    return reader.state


def load_created(run: RunDir) -> RunState:
    """Return of a run only its id, its name and its file: what its first line tells."""
    for line in LineTail(run.events).read():
        with contextlib.suppress(*_UNREADABLE):
            told = head.decode(line)
            if told is not None and isinstance(told[2], head.Created):
                return apply_controller_event(RunState(), told[1], told[2])
        break
    return load_told(run)


def load_told(run: RunDir) -> RunState:
    """Return what the controller alone told of a run: name and file, who takes part, and whether it is over."""
    reader = StateReader(run)
    reader.take_in_head(lambda _: None)
    return reader.state
