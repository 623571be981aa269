"""The states of the runs on this node, each folded only as far as its journal has grown since it was asked for last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.record import journal
from clusterctl.agent.record.state import NodeState, apply

if TYPE_CHECKING:
    from clusterctl.agent.record.rundir import RunDir


class States:
    """What the journals say. Nobody else may change what `of` returns."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[journal.Reader, NodeState]] = {}

    def of(self, run: RunDir) -> NodeState:
        """Return the state of a run; that of a run without a journal is new."""
        reader, state = self._known.get(run.path) or (journal.Reader(run.journal), NodeState())
        entries = reader.events()
        if reader.anew:
            state = NodeState()
        for entry in entries:
            apply(state, *entry)
        self._known[run.path] = (reader, state)
        return state
