"""Ends of output files straight from their nodes, over a live controller: both sides of that question."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.protocol.files import output_file
from clusterctl.errors import ClusterctlError
from clusterctl.logs.unreplicated import WINDOW, Piece
from clusterctl.run.controller import control

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.agent.protocol.types import arguments
    from clusterctl.logs.line import LogQuery
    from clusterctl.logs.output_files import OutputFile
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState
    from clusterctl.session.session import Session

COMMAND = "tails"
_MOST_BYTES = 6 * 1024 * 1024
_PATIENCE = 5.0
"""Seconds that a node may take for a piece: a person looks at what is read, and asks again."""


class NotYetError(ClusterctlError):
    """The controller is about to connect to the nodes."""


def read_on_nodes(
    run: str, sessions: Mapping[str, Session], places: Sequence[Sequence[Any]], length: int
) -> dict[str, Any]:
    """Return pieces of files from all nodes at once; what cannot be read is left out.

    Args:
        run: Id of the run.
        sessions: Those there are.
        places: `[node, attempt, rank, offset]`; a negative offset counts from the end.
        length: Bytes of each file at most.
    """
    # What only the controller needs: a view is on the screen sooner without it.
    from clusterctl.run.nodes.fan_out import each

    by_node: dict[str, list[Sequence[Any]]] = {}
    for place in places:
        by_node.setdefault(str(place[0]), []).append(place)

    def ask(node: str, session: Session) -> list[list[Any]]:
        return [lines for place in by_node[node] if (lines := _read(run, session, place, length))]

    found, _ = each({n: s for n, s in sessions.items() if n in by_node}, ask)
    return {"pieces": [piece for pieces in found.values() for piece in pieces]}


def _read(run: str, session: Session, place: Sequence[Any], length: int) -> list[Any] | None:
    node, attempt, rank, offset = place
    file = output_file(attempt, rank)
    request: arguments.Read = {"run": run, "node": node, "file": file, "offset": offset, "length": length}
    try:
        answer = session.call(Command.READ, request, timeout=_PATIENCE)
    except ClusterctlError:
        return None
    return [node, attempt, rank, answer["offset"], answer["size"], answer["data"]]


class ControllerSource:
    """Asks the controller of a run; without one there is nothing to be read ahead.

    Args:
        run: Which run.
        state: What is known of it; its attempt is the one that is read.
        query: Which ranks are wanted.
    """

    def __init__(self, run: RunDir, state: RunState, query: LogQuery) -> None:
        self._run = run
        self._places = [
            (n.node, state.attempt, rank)
            for n in state.nodes.values()
            for rank in n.ranks
            if n.link != "lost" and query.wants_file(n.node, rank, state.attempt)
        ]

    def ends(self) -> list[Piece]:
        """Return the end of every output file.

        Raises:
            NotYetError: In a moment the controller could tell.
        """
        length = min(WINDOW, _MOST_BYTES // max(1, len(self._places)))
        return self._ask([[*place, -length] for place in self._places], length)

    def beyond(self, places: Sequence[tuple[OutputFile, int]]) -> list[Piece]:
        """Return what files hold from these offsets on."""
        length = min(4 * WINDOW, _MOST_BYTES // max(1, len(places)))
        return self._ask([[f.node, f.attempt, f.rank, offset] for f, offset in places], length)

    def _ask(self, places: list[list[Any]], length: int) -> list[Piece]:
        if not places:
            return []
        try:
            answer = control.ask(self._run, COMMAND, {"places": places, "length": length}, timeout=2 * _PATIENCE)
        except control.NoControllerError:
            return []
        if answer.get("soon"):
            raise NotYetError("the controller connects to the nodes")
        return [
            Piece(node, attempt, rank, offset, size, base64.b64decode(data))
            for node, attempt, rank, offset, size, data in answer.get("pieces", [])
        ]
