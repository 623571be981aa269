"""What nodes are asked to tell of their runs: once a session, which then goes on with what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.protocol import encoding
from clusterctl.agent.protocol import requests as node_requests
from clusterctl.agent.protocol.commands import Command
from clusterctl.run.nodes.links import each, raise_first

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.run.controller.run import ControlledRun
    from clusterctl.session.conversation import Session

_CALL_SECONDS = 20.0


class Following:
    """Which sessions tell all of their nodes, and what of them need not be told again."""

    def __init__(self, run: ControlledRun) -> None:
        self._run = run
        self._by: dict[str, Session] = {}
        self._whole: dict[str, int] = {}

    def request(self, node: str) -> node_requests.Follow:
        """Return what asks a node for everything after the cursors."""
        run, whole = self._run, self._whole.get(node, 0)
        known, cursors = run.known(node), run.writer.cursors(node, whole)
        seq = known.seq if known else 0
        return node_requests.Follow(run=run.folder.run, node=node, seq=seq, cursors=cursors, whole=whole)

    def follow(self, nodes: Iterable[str]) -> None:
        """Ask nodes for everything after the cursors, all at once, unless their sessions tell it already.

        For launch threads.

        Raises:
            ClusterctlError: Some did not answer.
        """
        there = self._run.links.sessions
        wanted = [node for node in nodes if node not in there or self._by.get(node) is not there[node]]
        requests = self._run.hand_over(lambda: {node: self.request(node) for node in wanted})
        sessions = {node: session for node, session in self._run.links.sessions.items() if node in requests}
        errors = each(sessions, lambda n, s: self.by(n, s, requests[n]))[1]
        raise_first(errors)

    def by(self, node: str, session: Session, request: node_requests.Follow) -> None:
        """Have a session tell all of its node: that of the attempts to come, too.

        Raises:
            ClusterctlError: The node would not, or did not answer.
        """
        session.call(Command.FOLLOW, encoding.to_wire(request), timeout=_CALL_SECONDS)
        self._by[node] = session

    def is_whole(self, node: str, before: int) -> None:
        """Take note that the replicas of a node are whole for attempts before that one; 0 where nobody knows."""
        self._whole[node] = before
        self._run.writer.close_before(node, before)
