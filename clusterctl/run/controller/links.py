"""The sessions with the nodes, and the subscriptions to the nodes' files. If a session breaks, its node is redialed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from clusterctl.agent.protocol.run_requests import FollowArguments
from clusterctl.config.spec import HostSpec
from clusterctl.errors import AuthError
from clusterctl.run.controller.executor import LoopExecutor
from clusterctl.run.nodes.fan_out import call_all, raise_first
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.thread_ownership import ThreadOwned
from clusterctl.run.rules.state import NodeState
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import FOLLOW

_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 15.0
_AFTER_AUTH_ERROR_S = 60.0
_GOOD_AFTER_S = 30.0
"""After a connection that lasted at least this many seconds, the node is redialed without a pause."""


class Links(ThreadOwned):
    """The sessions with the nodes, one for each node. A broken session is redialed.

    Thread: the loop owns this object; other threads dial. Any thread may read `sessions`.

    Args:
        dial: A function that opens a session to a host, or raises NodeError.
        executor: The executor that starts the threads that dial.

    Attributes:
        on_dialed: The function that the loop calls with node and session after a redial.
        sessions: The session of each connected node. The mapping is replaced and never changed, so that other threads
            read it consistently.
    """

    def __init__(self, dial: Callable[[HostSpec], Session], executor: LoopExecutor) -> None:
        self.on_dialed: Callable[[str, Session], object] = lambda _node, session: session.close()
        self._dial, self._executor = dial, executor
        self._closed = False
        self._hurries = 0
        self._changed = threading.Condition()
        self._dialing: set[str] = set()
        self._broken_at: dict[str, float] = {}
        self._cut_at: dict[str, float] = {}
        self._added_at: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self.sessions: Mapping[str, Session] = {}

    def add_session(self, host: HostSpec, session: Session) -> bool:
        """Add an open session and return True. If the session has broken, return False and dial the host again."""
        self.check_owner()
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
        """Drop the session of a host, and dial until the host answers. Ignore an outdated `session`.

        Repeated calls have no effect.
        """
        self.check_owner()
        current, now = self.sessions.get(host.name), time.monotonic()
        if session is not None and current is not session:
            return
        if current is not None:
            self._broken_at[host.name] = now - current.silence_s
            self.sessions = {node: s for node, s in self.sessions.items() if node != host.name}
            self._executor.run_in_thread(current.close)
        self._broken_at.setdefault(host.name, now)
        self._cut_at.setdefault(host.name, now)
        if host.name in self._dialing:
            return
        self._dialing.add(host.name)
        # After a long connection there is no pause. Otherwise the pause grows, so that a node that accepts logins and
        # then breaks the connection is not dialed all the time.
        was_good = now - self._added_at.get(host.name, float("-inf")) >= _GOOD_AFTER_S
        pause = 0.0 if was_good or host.name not in self._pauses else _next_pause(self._pauses[host.name])
        self._pauses[host.name], hurries = pause, self._hurries
        self._executor.run_in_thread(
            lambda: self._dial_until_connected(host, pause, hurries),
            lambda opened: opened and self.on_dialed(host.name, opened),
        )

    def is_connection_broken(self, node: str) -> bool:
        """Return whether a node had a connection and has none now."""
        current = self.sessions.get(node)
        return node in self._broken_at if current is None else not current.alive

    def measure_silence_s(self, after: float) -> dict[str, float]:
        """Return the seconds of silence of each node that has been silent for more than `after` seconds."""
        now = time.monotonic()
        quiet = {node: s.silence_s for node, s in self.sessions.items() if s.silence_s > after}
        return quiet | {node: now - last for node, last in self._broken_at.items()}

    def measure_unreachable_s(self) -> dict[str, float]:
        """Return, for each node without a connection, the seconds since its connection was closed.

        Silence before the connection was closed does not count, because the node may have received messages of the
        head.
        """
        now = time.monotonic()
        return {node: now - moment for node, moment in self._cut_at.items()}

    def redial_all_now(self) -> None:
        """Dial every node without a connection now, without the pause, because the user is waiting."""
        with self._changed:
            self._hurries += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Close all sessions, and stop dialing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        call_all(self.sessions, lambda _, session: session.close())

    def _dial_until_connected(self, host: HostSpec, pause: float, hurries: int) -> Session | None:
        """Return a new session; `None` if the controller ends. Runs in a thread."""
        while self._wait(pause, hurries):
            hurries = self._hurries
            try:
                session = self._dial(host)
            except AuthError:
                # A server that refuses the key will refuse it again, and may block this head after some tries.
                pause = _AFTER_AUTH_ERROR_S
            except Exception:
                pause = _next_pause(pause)
            else:
                if not self._closed:
                    return session
                session.close()
        return None

    def _wait(self, pause: float, hurries: int) -> bool:
        """Wait `pause` seconds, or until `redial_all_now` changes `hurries`. Return False if dialing has to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._hurries != hurries, pause)
            return not self._closed


def _next_pause(pause: float) -> float:
    return min(max(_FIRST_PAUSE_S, pause * 2), _MAX_PAUSE_S)


_PIECES_PER_S = 4000.0
"""The most pieces of output per second that all nodes together may send. Each piece takes the head 0.1 ms."""


_MIN_PACE_S, _MAX_PACE_S = 0.02, 0.25


def choose_output_delay_s(nodes: int) -> float:
    """Return for how many seconds each node of a run may hold back output, in order to send larger pieces."""
    seconds = min(_MAX_PACE_S, nodes / _PIECES_PER_S)
    return seconds if seconds >= _MIN_PACE_S else 0.0


class Subscriptions(ThreadOwned):
    """The subscriptions of the head to journals and files of nodes, and the attempts that are completely replicated.

    Thread: the loop owns this object; `subscribe_all` is for launch threads.

    Args:
        run: Id of the run.
        nodes: Number of nodes of the run.
        links: The sessions.
        writer: The writer of the run directory.
        find_node: Returns the state of a node.
        executor: The executor of the loop.

    Attributes:
        pace_s: How long each node may hold back output, in seconds.
    """

    def __init__(
        self,
        run: str,
        nodes: int,
        links: Links,
        writer: RunDirWriter,
        find_node: Callable[[str], NodeState | None],
        executor: LoopExecutor,
    ) -> None:
        self._run, self._links, self._writer = run, links, writer
        self._find_node, self._executor = find_node, executor
        self.pace_s = choose_output_delay_s(nodes)
        self._subscribed: dict[str, Session] = {}
        self._replicated_before: dict[str, int] = {}

    def build_request(self, node: str) -> FollowArguments:
        """Return the request for the journal events and output of a node that are missing in the replicas."""
        before = self._replicated_before.get(node, 0)
        known, cursors = self._find_node(node), self._writer.list_cursors(node, before)
        seq = known.seq if known else 0
        return FollowArguments(
            run=self._run, node=node, seq=seq, cursors=cursors, complete_before=before, pace=self.pace_s
        )

    def subscribe_all(self, nodes: Iterable[str]) -> None:
        """Subscribe at once to all nodes whose sessions are not subscribed yet. For launch threads.

        Raises:
            ClusterctlError: A node did not answer.
        """

        def build_requests() -> dict[str, tuple[Session, FollowArguments]]:
            sessions = {node: session for node in nodes if (session := self._links.sessions.get(node)) is not None}
            return {n: (s, self.build_request(n)) for n, s in sessions.items() if self._subscribed.get(n) is not s}

        wanted = self._executor.call_on_loop(build_requests)
        _, errors = call_all(wanted, lambda _, one: FOLLOW.call(one[0], one[1]))
        done = {node: session for node, (session, _) in wanted.items() if node not in errors}
        self._executor.call_on_loop(lambda: self.mark_subscribed(done))
        raise_first(errors)

    def mark_subscribed(self, sessions: Mapping[str, Session]) -> None:
        """Record that these sessions are subscribed, so that no later attempt subscribes them again."""
        self.check_owner()
        self._subscribed.update(sessions)

    def mark_replicated_before(self, node: str, before: int) -> None:
        """Record that all attempts of a node before attempt `before` are replicated. 0 means that this is unknown."""
        self.check_owner()
        self._replicated_before[node] = before
        self._writer.close_earlier_attempts(node, before)
