"""The links to the nodes: one session per node, redialed if it breaks, and what each session is subscribed to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from clusterctl.agent.protocol.requests import Follow
from clusterctl.config.spec import HostSpec
from clusterctl.errors import (
    AuthError,
    NodeError,
)
from clusterctl.run.controller.executor import LoopExecutor
from clusterctl.run.nodes.fan_out import call_all, raise_first
from clusterctl.run.record.ownership import ThreadOwned
from clusterctl.run.record.writer import Writer
from clusterctl.run.rules.state import NodeState
from clusterctl.session.inbox import Inbox
from clusterctl.session.requests import FOLLOW
from clusterctl.session.session import Session

_FIRST_PAUSE = 1.0


_LONGEST_PAUSE = 15.0


_AFTER_REFUSED_LOGIN = 60.0


_GOOD_SECONDS = 30.0
"""A connection that held for so long was a good one: the next is dialed at once when it breaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redialed:
    """A node has a new session."""

    node: str
    session: Session


class Links(ThreadOwned):
    """One session per node, redialed if it breaks.

    Thread: the loop owns it; other threads dial, and bring a session back by the inbox. Any may read `sessions`.

    Args:
        dial: Opens a session to a host; raises NodeError.
        inbox: Where `Redialed` goes.

    Attributes:
        sessions: The session of each node that has one. Never changed but put in place anew, so that another thread
            that takes it has it as it was at that moment.
    """

    def __init__(self, dial: Callable[[HostSpec], Session], inbox: Inbox) -> None:
        self._dial = dial
        self._inbox = inbox
        self._closed = False
        self._hurries = 0
        self._changed = threading.Condition()
        self._dialing: set[str] = set()
        self._broken_at: dict[str, float] = {}
        self._cut_at: dict[str, float] = {}
        self._added_at: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self.sessions: Mapping[str, Session] = {}

    def add(self, host: HostSpec, session: Session) -> bool:
        """Take in a session that was opened, and return True.

        One that broke before it got here takes nobody's place: its host is dialed again if it has no other.
        """
        self.check()
        node = host.name
        self._dialing.discard(node)
        if not session.alive:
            session.close()
            if node not in self.sessions:
                self.redial(host)
            return False
        old = self.sessions.get(node)
        if old is not None:
            old.close()
        self._broken_at.pop(node, None)
        self._cut_at.pop(node, None)
        self._added_at[node] = time.monotonic()
        self.sessions = {**self.sessions, node: session}
        return True

    def redial(self, host: HostSpec, session: Session | None = None) -> None:
        """Forget a session that broke (`session`: only if it is still the one), and dial again until it answers.

        Repeating it does nothing.
        """
        self.check()
        current = self.sessions.get(host.name)
        if session is not None and current is not session:
            return
        if current is not None:
            self._broken_at[host.name] = time.monotonic() - current.silence_s
            self.sessions = {node: s for node, s in self.sessions.items() if node != host.name}
            threading.Thread(target=current.close, daemon=True).start()
        self._broken_at.setdefault(host.name, time.monotonic())
        self._cut_at.setdefault(host.name, time.monotonic())
        if host.name not in self._dialing:
            self._dialing.add(host.name)
            self._pauses[host.name] = self._pause_after(host.name)
            dialed = (host, self._hurries)
            threading.Thread(
                target=self._dial_until_connected, args=dialed, name=f"dial {host.name}", daemon=True
            ).start()

    def is_broken(self, node: str) -> bool:
        """Return whether a node's connection is what broke: not where it has a new one, or none was ever taken in."""
        current = self.sessions.get(node)
        return node in self._broken_at if current is None else not current.alive

    def list_silent(self, after: float) -> dict[str, float]:
        """Return the nodes that have not been heard for over `after` seconds, with how long that is."""
        now = time.monotonic()
        quiet = {node: s.silence_s for node, s in self.sessions.items() if s.silence_s > after}
        return quiet | {node: now - last for node, last in self._broken_at.items()}

    def list_unreachable(self) -> dict[str, float]:
        """Return the nodes without a connection, with the seconds since which nothing of ours can have reached them.

        The stretch of silence before the connection was closed does not count: our own frames may have arrived then.
        """
        now = time.monotonic()
        return {node: now - moment for node, moment in self._cut_at.items()}

    def redial_now(self) -> None:
        """Dial every missing node now, without the rest of the pause: a person waits."""
        with self._changed:
            self._hurries += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Close everything; stop dialing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        call_all(self.sessions, lambda _, session: session.close())

    def _pause_after(self, node: str) -> float:
        """Return how long to wait before the first try: not at all after a good connection, else more each time.

        A node that lets us in and then breaks off would otherwise be logged into again and again without a pause.
        """
        held = time.monotonic() - self._added_at.get(node, float("-inf"))
        return 0.0 if held >= _GOOD_SECONDS or node not in self._pauses else _next_pause(self._pauses[node])

    def _dial_until_connected(self, host: HostSpec, hurries: int) -> None:
        pause = self._pauses[host.name]
        while self._waited(pause, hurries):
            hurries = self._hurries
            try:
                session = self._dial(host)
            except NodeError as error:
                # A server that refuses our key will do so again, and counts it: do not knock on it.
                pause = _AFTER_REFUSED_LOGIN if isinstance(error, AuthError) else _next_pause(pause)
            except Exception:
                pause = _next_pause(pause)
            else:
                if self._closed:
                    session.close()
                else:
                    self._inbox.put(Redialed(node=host.name, session=session))
                return

    def _waited(self, pause: float, hurries: int) -> bool:
        """Return when a pause is over or cut short (`hurries` were known); false where nothing is to be dialed for."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._hurries != hurries, pause)
            return not self._closed


def _next_pause(pause: float) -> float:
    return min(max(_FIRST_PAUSE, pause * 2), _LONGEST_PAUSE)


_PIECES = 4000.0
"""So many pieces of output a second may come from all nodes together: each costs the head 0.1 ms, however small."""


_LEAST_PACE, _MOST_PACE = 0.02, 0.25


def choose_pace_s(nodes: int) -> float:
    """Return how long, in seconds, each of so many nodes may keep a little output for more to come."""
    seconds = min(_MOST_PACE, nodes / _PIECES)
    return seconds if seconds >= _LEAST_PACE else 0.0


class Subscriptions(ThreadOwned):
    """Which sessions send everything of their nodes, and what of it the head has already.

    Thread: the loop owns it; `subscribe_all` is for launch threads.

    Args:
        run: Id of the run.
        nodes: How many it has.
        links: The sessions.
        writer: Has the replicas.
        find_node: Returns what is known of a node.
        executor: Of the loop.

    Attributes:
        pace_s: For how long each node may hold a little output back, by how many nodes there are.
    """

    def __init__(
        self,
        run: str,
        nodes: int,
        links: Links,
        writer: Writer,
        find_node: Callable[[str], NodeState | None],
        executor: LoopExecutor,
    ) -> None:
        self._run, self._links, self._writer = run, links, writer
        self._find_node, self._executor = find_node, executor
        self.pace_s = choose_pace_s(nodes)
        self._subscribed: dict[str, Session] = {}
        self._replicated_before: dict[str, int] = {}

    def build_request(self, node: str) -> Follow:
        """Return the request for everything of a node after the cursors."""
        before = self._replicated_before.get(node, 0)
        known, cursors = self._find_node(node), self._writer.list_cursors(node, before)
        seq = known.seq if known else 0
        return Follow(run=self._run, node=node, seq=seq, cursors=cursors, complete_before=before, pace=self.pace_s)

    def subscribe_all(self, nodes: Iterable[str]) -> None:
        """Subscribe to nodes whose sessions are not subscribed yet, all at once. For launch threads.

        Raises:
            ClusterctlError: Some did not answer.
        """

        def build_requests() -> dict[str, tuple[Session, Follow]]:
            sessions = {node: session for node in nodes if (session := self._links.sessions.get(node)) is not None}
            return {n: (s, self.build_request(n)) for n, s in sessions.items() if self._subscribed.get(n) is not s}

        wanted = self._executor.call_on_loop(build_requests)
        _, errors = call_all(wanted, lambda _, one: FOLLOW.call(one[0], one[1]))
        done = {node: session for node, (session, _) in wanted.items() if node not in errors}
        self._executor.call_on_loop(lambda: self.mark_subscribed(done))
        raise_first(errors)

    def mark_subscribed(self, sessions: Mapping[str, Session]) -> None:
        """Note that these sessions send everything of their nodes, of the attempts to come too."""
        self.check()
        self._subscribed.update(sessions)

    def mark_replicated(self, node: str, before: int) -> None:
        """Note that the head has all of a node's attempts below `before`; 0 if that is not known."""
        self.check()
        self._replicated_before[node] = before
        self._writer.close_old_attempts(node, before)
