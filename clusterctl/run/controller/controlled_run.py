"""A run as the controller holds it: the state, the methods that change the state, and the requests to the nodes.

The thread of the loop owns the state, the files and the connections. Other threads open connections and send requests.
The executor passes the results of these threads to the loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from typing_extensions import override

from clusterctl.agent.protocol import command_payload_types, run_requests
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.errors import ClusterctlError
from clusterctl.formatting import plural
from clusterctl.run.controller.control_socket import ControlServer
from clusterctl.run.controller.executor import LoopExecutor
from clusterctl.run.controller.links import Links, Subscriptions
from clusterctl.run.nodes.attempt_start import AttemptLauncher
from clusterctl.run.nodes.fan_out import Progress, call_all
from clusterctl.run.record.head_clock import read_head_time
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import load_state
from clusterctl.run.record.thread_ownership import ThreadOwnedAttributes
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.controller_events import build_start_failed
from clusterctl.run.rules.next_action import StopTimers, build_run_limits
from clusterctl.run.rules.state import NodeState, RankIndex
from clusterctl.run.rules.state_updates import apply_controller_event, apply_node_event
from clusterctl.session.connect import open_in_parallel
from clusterctl.session.controller_inbox import EventReceived, Inbox, InboxItemQueue
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import FINISH, STOP
from clusterctl.validation.journal_lines import list_event_ranks

Post = Callable[[controller_events.ControllerEvent], None]
Dial = Callable[[HostSpec, InboxItemQueue, Callable[[str], None]], Session]
"""Opens a session to a host, which puts received data into the inbox and reports progress to a callback."""

_KILL_TIMEOUT_S = 5.0
"""Seconds that a node may take to finish a run that the user has killed."""


class ControlledRun(ThreadOwnedAttributes):
    """A run, its nodes, and the requests to the nodes.

    Thread: only the loop changes this object. Other threads may read `spec`, `hosts`, `epoch` and `links.sessions`,
    wait for `cancelled`, and call `post_event`, `executor`, `dial_all` and `send_finish`.

    Args:
        folder: The run directory; this object becomes its only writer.
        spec: The spec of the cluster file, with secrets.
        dial: Opens a session to a host.

    Attributes:
        inbox: The queue of the loop.
        executor: Passes calls of other threads, and results of threads, to the loop.
        is_busy: Whether a launch thread is running.
        cancelled: Set when the user has cancelled the run.
        kill: Whether the user has killed the run, so that the grace is 0.
        excluded_spares: Spares that must not be used, each with a reason of a few words.
        epoch: The epoch of this controller's requests; 0 before the first session is added.
        subscriptions: The subscriptions to the journals and files of nodes.
        stopping: The timers of the nodes that got a stop request.
    """

    def __init__(self, folder: RunDir, spec: ClusterSpec, dial: Dial) -> None:
        self.folder, self.spec = folder, spec
        self.inbox = Inbox()
        self.executor = LoopExecutor(self.inbox.put)
        self._dial = dial
        self.writer = RunDirWriter(folder)
        self.links = Links(lambda host: dial(host, self.inbox, lambda _: None), self.executor)
        self.hosts = {h.name: h for h in spec.hosts}
        self.limits = build_run_limits(spec)
        self.state = load_state(folder)
        self.epoch = 0
        self.is_busy = self.kill = False
        self.cancelled = threading.Event()
        self._places = RankIndex()
        self.subscriptions = Subscriptions(
            folder.run, len(spec.hosts), self.links, self.writer, self.find_node, self.executor
        )
        self.excluded_spares: dict[str, str] = {}
        self.stopping = StopTimers()
        self.launcher = AttemptLauncher(
            folder, spec, lambda: self.links.sessions, self.post_event, self.cancelled, self.is_ending
        )
        self.control = ControlServer(folder.create_control_address(), self.inbox.put)

    @override
    def take_ownership(self) -> None:
        """Make this thread the only thread that may change the run, its files and its links."""
        super().take_ownership()
        self.writer.take_ownership()
        self.links.take_ownership()
        self.subscriptions.take_ownership()

    def close(self) -> None:
        """Close every session and file."""
        self.inbox.close()
        self.links.close()
        self.writer.close()
        self.control.close()

    # --- from other threads

    def is_ending(self, attempt: int) -> bool:
        """Return whether an attempt ends."""
        state = self.state
        return state.attempt == attempt and state.reason is not None

    def post_event(self, event: controller_events.ControllerEvent) -> None:
        """Have the loop record an event; do not wait."""
        self.executor.call_soon(lambda: self.record_event(event))

    def post_note(self, text: str, level: str = "warn") -> None:
        """Have the loop record a message for the user; do not wait."""
        self.post_event(controller_events.Note(text=text, level=level))

    # --- the state

    def record_event(self, event: controller_events.ControllerEvent) -> None:
        """Write an event into the controller's journal, and apply it to the state."""
        self.check_owner()
        moment = read_head_time()
        self.writer.append(event, moment)
        self.state = apply_controller_event(self.state, moment, event)

    def record_note(self, text: str, level: str = "warn") -> None:
        """Record a message for the user."""
        self.record_event(controller_events.Note(text=text, level=level))

    def apply_received_event(self, received: EventReceived) -> None:
        """Replicate an event of a node's journal, and apply it to the state; a known event is ignored."""
        node_state = self.find_node(received.node)
        if node_state is None or received.stamp.seq <= node_state.seq:
            return
        self._validate_owner(received)
        lacking = received.stamp.seq - node_state.seq - 1
        if lacking:
            self.record_note(
                f"{received.node}: its journal lacks {plural(lacking, 'event')} before number {received.stamp.seq}"
            )
        # Change the state before the journal, because an event that cannot be applied must not be written to the
        # journal.
        state = apply_node_event(self.state, received.node, received.stamp, received.event)
        self.writer.append_node_event(received.node, received.record)
        self.state = state

    def _validate_owner(self, received: EventReceived) -> None:
        """Raise `FrameError` if an event of a node is about another run, or about ranks of other nodes."""
        if received.run != self.folder.run:
            raise FrameError(f"its event is about the run {received.run[:80]!a}")
        attempt = getattr(received.event, "attempt", self.state.attempt)
        placed = self.find_ranks_on(received.node, attempt)
        strange = [rank for rank in list_event_ranks(received.event) if placed is not None and rank not in placed]
        if strange:
            raise FrameError(f"its event `{received.event.KIND}` is about rank {strange[0]}, which is not on this node")

    def find_ranks_on(self, node: str, attempt: int) -> frozenset[int] | None:
        """Return the ranks of a node in an attempt; `None` for an attempt that has not been recorded yet."""
        return None if attempt > self.state.attempt else self._places.find_ranks(self.state.placements, attempt, node)

    def find_node(self, node: str) -> NodeState | None:
        """Return the state of a node that took part in this attempt or in an earlier attempt."""
        return self.state.nodes.get(node) or self.state.retired.get(node)

    def list_all_nodes(self) -> list[str]:
        """Return the nodes of this attempt and of earlier attempts."""
        return [*self.state.nodes, *self.state.retired]

    def get_attempt_sessions(self) -> dict[str, Session]:
        """Return the sessions with nodes of this attempt."""
        return {n: s for n, s in self.links.sessions.items() if n in self.state.nodes}

    # --- to the nodes

    def dial_all(
        self,
        hosts: Iterable[HostSpec],
        step: Progress | None = None,
        joined: Callable[[str, Session], None] = lambda _node, _session: None,
    ) -> tuple[dict[str, Session], dict[str, ClusterctlError]]:
        """Open a session to every host, all at once; return the sessions and the errors. The loop must not call this.

        `joined` is called with each open session, on the thread that opened the session.
        """
        wanted = list(hosts)
        shown = step or Progress("connect", len(wanted), lambda _: None)

        def one(host: HostSpec) -> Session:
            shown.set_waiting(host.name, "connecting")
            session = self._dial(host, self.inbox, lambda what: shown.set_waiting(host.name, what))
            shown.finish_node(host.name)
            joined(host.name, session)
            return session

        return open_in_parallel(wanted, one, self.spec.ssh.parallel, ClusterctlError)

    def raise_epoch(self, known: int) -> None:
        """Choose an epoch above `known` and all earlier epochs of this head. Present sessions use this epoch, too."""
        if self.epoch <= known:
            self.epoch = self.writer.raise_epoch(known)
            for session in self.links.sessions.values():
                session.epoch = self.epoch

    def add_session(self, node: str, session: Session) -> bool:
        """Give a session this controller's epoch, and add the session to the run. Return False if it has broken."""
        session.epoch = self.epoch
        return self.links.add_session(self.hosts[node], session)

    @property
    def grace(self) -> float:
        """Seconds from SIGTERM to SIGKILL in a stop that begins now."""
        return 0.0 if self.kill else self.limits.grace

    def end_attempt(self, reason: StopReason, message: str) -> None:
        """Record that the attempt ends, and stop it on its nodes."""
        self.record_event(
            controller_events.AttemptEndDecided(attempt=self.state.attempt, reason=reason.value, message=message)
        )
        self.stopping.reset()
        self.stop_all_nodes(reason.value)
        self.control.notify_watchers()

    def end_partly_started_attempt(self, error: ClusterctlError) -> None:
        """End an attempt that could not be started on every node."""
        cancelled = self.cancelled.is_set()
        if not cancelled:
            self.record_event(build_start_failed(error))
        if self.state.reason is None:
            self.end_attempt(StopReason.CANCELLED if cancelled else StopReason.START_FAILED, str(error))

    def stop_all_nodes(self, reason: str) -> None:
        """Stop the attempt on every node that has not reported the end of the attempt."""
        for node in self.state.nodes.values():
            if not node.swept:
                self.stop_node(node.node, reason)

    def stop_node(self, node: str, reason: str) -> None:
        """Stop the attempt on a node.

        A second stop may shorten the grace. A node without a session gets the stop request after it reconnects.
        """
        session = self.links.sessions.get(node)
        if session is None:
            return
        self.stopping.start(node)
        request = run_requests.StopArguments(run=self.folder.run, node=node, grace=self.grace, reason=reason)

        def redial_after_error(answer: Future[command_payload_types.EmptyAnswer]) -> None:
            if answer.exception() is not None:
                self.executor.call_soon(lambda: self.links.redial(self.hosts[node], session))

        # A slow node has received the request, even if the answer is late. The policy limits the time of a stop.
        STOP.call_async(session, request).add_done_callback(redial_after_error)

    def send_finish(self, sessions: Mapping[str, Session], state: str, code: int) -> dict[str, ClusterctlError]:
        """Send the end of the run to nodes; return the errors. Any thread may call this."""
        timeout = _KILL_TIMEOUT_S if self.kill else None
        what: command_payload_types.FinishArguments = {
            "run": self.folder.run,
            "node": "",
            "state": state,
            "exit_code": code,
        }
        return call_all(sessions, lambda n, s: FINISH.call(s, {**what, "node": n}, timeout=timeout))[1]

    def cancel(self, *, kill: bool) -> None:
        """Cancel the run gracefully, or kill it."""
        self.cancelled.set()
        self.links.redial_all_now()
        if kill:
            self.executor.call_soon(self.kill_now)

    def kill_now(self) -> None:
        """Set the grace to 0, also for stops that are already running."""
        if self.kill:
            return
        self.kill = True
        self.stopping.start_kill_timer(time.monotonic())
        if self.state.reason is not None:
            self.stop_all_nodes(self.state.reason)
