"""Reads a run directory as it grows: what is new since the last look, and the state that follows from it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from clusterctl.agent import protocol as wire
from clusterctl.run import events as head
from clusterctl.run.state import RunState, apply_head, apply_node

if TYPE_CHECKING:
    from pathlib import Path

    from clusterctl.run.store import RunDir

NodeNews = tuple[str, wire.Stamp, wire.Event]
HeadNews = tuple[float, head.ControllerEvent]


class LineTail:
    """The whole lines that a file has gained since the last look; a torn last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[bytes]:
        """Return the new lines."""
        try:
            if self._path.stat().st_size <= self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].splitlines()


class StateReader:
    """Folds a run directory. `state` is what the last `refresh` made of it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._head = LineTail(run.events)
        self._nodes: dict[str, LineTail] = {}
        self.state = RunState()

    def refresh(self) -> tuple[list[HeadNews], list[NodeNews]]:
        """Take in what is new; return it, the controller's events and the nodes'.

        The nodes' journals are read first and applied last: an attempt is always known before what happened in it.
        """
        waiting = self._read_nodes()
        heads: list[HeadNews] = []
        for line in self._head.read():
            with contextlib.suppress(wire.FrameError):
                decoded = head.decode(line)
                if decoded is not None:
                    _, time, event = decoded
                    heads.append((time, event))
                    self.state = apply_head(self.state, time, event)
        for node, stamp, node_event in waiting:
            self.state = apply_node(self.state, node, stamp, node_event)
        return heads, waiting

    def _read_nodes(self) -> list[NodeNews]:
        news: list[NodeNews] = []
        for node in _names(self._run.path / "nodes"):
            if node not in self._nodes:
                self._nodes[node] = LineTail(self._run.node(node) / wire.JOURNAL_FILE)
            for line in self._nodes[node].read():
                with contextlib.suppress(wire.FrameError):
                    decoded = wire.decode_event(line)
                    if decoded is not None:
                        news.append((node, *decoded))
        return news


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def load_state(run: RunDir) -> RunState:
    """Return the state of a run from its files alone."""
    reader = StateReader(run)
    reader.refresh()
    return reader.state
