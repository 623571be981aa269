"""What nodes are asked to tell of their runs: once a session, which then goes on with what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.protocol.requests import Follow
from clusterctl.run.nodes.fan_out import each, raise_first
from clusterctl.session.requests import FOLLOW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from clusterctl.run.nodes.links import Links
    from clusterctl.run.record.writer import Writer
    from clusterctl.run.rules.state import NodeState
    from clusterctl.session.session import Session


_PIECES = 4000.0
"""So many pieces of output a second may come from all nodes together: each costs the head 0.1 ms, however small."""
_LEAST_PACE, _MOST_PACE = 0.02, 0.25


def pace(nodes: int) -> float:
    """Return how long, in seconds, each of so many nodes may keep a little output for more to come."""
    seconds = min(_MOST_PACE, nodes / _PIECES)
    return seconds if seconds >= _LEAST_PACE else 0.0


class Following:
    """Which sessions tell all of their nodes, and what of them need not be told again.

    Args:
        run: Id of the run.
        nodes: How many it has.
        known: What is known of a node.
        hand_over: Has the loop do something, and returns what that gave.

    Attributes:
        pace: What nodes are asked for by how many they are.
    """

    def __init__(
        self,
        run: str,
        nodes: int,
        links: Links,
        writer: Writer,
        known: Callable[[str], NodeState | None],
        hand_over: Callable[[Callable[[], dict[str, Follow]]], dict[str, Follow]],
    ) -> None:
        self._run, self._links, self._writer = run, links, writer
        self._known, self._hand_over = known, hand_over
        self.pace = pace(nodes)
        self._by: dict[str, Session] = {}
        self._whole: dict[str, int] = {}

    def request(self, node: str) -> Follow:
        """Return what asks a node for everything after the cursors."""
        whole = self._whole.get(node, 0)
        known, cursors = self._known(node), self._writer.list_cursors(node, whole)
        seq = known.seq if known else 0
        return Follow(run=self._run, node=node, seq=seq, cursors=cursors, complete_before=whole, pace=self.pace)

    def follow(self, nodes: Iterable[str]) -> None:
        """Ask nodes for everything after the cursors, all at once, unless their sessions tell it already.

        For launch threads.

        Raises:
            ClusterctlError: Some did not answer.
        """
        there = self._links.sessions
        wanted = [node for node in nodes if node not in there or self._by.get(node) is not there[node]]
        requests = self._hand_over(lambda: {node: self.request(node) for node in wanted})
        sessions = {node: session for node, session in self._links.sessions.items() if node in requests}
        errors = each(sessions, lambda n, s: self.by(n, s, requests[n]))[1]
        raise_first(errors)

    def by(self, node: str, session: Session, request: Follow) -> None:
        """Have a session tell all of its node: that of the attempts to come, too.

        Raises:
            ClusterctlError: The node would not, or did not answer.
        """
        FOLLOW.call(session, request)
        self._by[node] = session

    def is_whole(self, node: str, before: int) -> None:
        """Take note that the replicas of a node are whole for attempts before that one; 0 where nobody knows."""
        self._whole[node] = before
        self._writer.close_old_attempts(node, before)
