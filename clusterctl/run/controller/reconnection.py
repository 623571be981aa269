"""Handles lost connections to nodes, and resumes nodes that are connected again."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field

from clusterctl.agent.protocol import run_requests
from clusterctl.agent.protocol.command_payload_types import StatusAnswer
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.record_types import RemainingProcess
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.config.spec import HostSpec
from clusterctl.errors import (
    AgentError,
    ClusterctlError,
    ConnectError,
    ExitCode,
    NotFoundError,
    RunFailed,
)
from clusterctl.run.controller import replication
from clusterctl.run.controller.controlled_run import ControlledRun
from clusterctl.run.nodes import run_end_on_nodes
from clusterctl.run.record.head_clock import read_head_time
from clusterctl.run.record.thread_ownership import ThreadOwnedAttributes
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.next_action import ProtocolViolationCounter
from clusterctl.run.rules.state import NodeState, RunState, WorkerPhase
from clusterctl.session.controller_inbox import ClockMeasured, SessionLost
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import FOLLOW, STATUS, ProtocolError, StaleEpochError

SILENT_AFTER_S = 6.5
_QUOTED = 300
_AHEAD_STEP = 0.1
"""The smallest recorded change of a wall clock, in seconds. The times of output are no more exact."""
_SILENT = "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resumption:
    """The result of resuming a node.

    Attributes:
        has_files: Whether the node has the files of the run. The head is then subscribed to these files again.
        status: The status of the node; set only if it is unknown whether the workers were started.
        remaining: The processes of the run that could not be ended on a node without files.
    """

    has_files: bool
    status: StatusAnswer | None = None
    remaining: list[RemainingProcess] = field(default_factory=list)


class Reconnection(ThreadOwnedAttributes):
    """Records changes of the links of a run, and resumes nodes that are connected again.

    Thread: the loop; `_resume` works in a thread for each session.

    Attributes:
        is_superseded: Another controller has adopted the run. This controller must then do nothing more.
    """

    def __init__(self, run: ControlledRun) -> None:
        self._run = run
        self._uncompared: set[str] = set()
        self._stale: set[str] = set()
        self._violations = ProtocolViolationCounter()
        self.is_superseded = False

    def record_clock(self, measured: ClockMeasured) -> None:
        """Keep the best estimate of the offset of a node's clock."""
        node = self._run.state.nodes.get(measured.node)
        if node is None:
            return
        offset = read_head_time() - time.monotonic() - measured.mono_offset_s
        # The offset is relative to `read_head_time`, which ignores changes of the head's wall clock.
        ahead = measured.wall_offset_s + time.time() - read_head_time()
        if (
            node.clock is None
            or measured.error_s < node.clock[1] / 2
            or abs(offset - node.clock[0]) > 5 * node.clock[1] + 0.005
            or abs(ahead - node.clock_ahead_s) > measured.error_s + _AHEAD_STEP
        ):
            self._run.record_event(
                controller_events.ClockEstimated(
                    node=measured.node, offset=offset, error=measured.error_s, boot=measured.boot, ahead=ahead
                )
            )

    # --- another controller

    def on_stale_epoch(self, node: str) -> None:
        """End the session with a node that has a newer controller. Without other sessions, this controller ends, too.

        One node among several cannot end this controller, because the answer of one node may be wrong.
        """
        run = self._run
        if node not in run.links.sessions:
            return
        self._stale.add(node)
        run_nodes = set(run.list_all_nodes()) or set(run.hosts)
        if run.links.sessions.keys() & run_nodes <= self._stale:
            self.is_superseded = True
            run.record_note(
                f"another controller has adopted the run on {node}: this controller ends, and the run continues"
            )
        else:
            text = "it reports another controller, which no other node reports"
            self.on_invalid_message(node, FrameError(text))

    # --- invalid messages

    def on_invalid_message(self, node: str, error: Exception) -> None:
        """End the session of a node that sent an invalid message.

        A node that has sent a few invalid messages counts as lost.
        """
        host = self._run.hosts.get(node)
        if not isinstance(error, (FrameError, ClusterctlError)):
            traceback.print_exception(error)
        # Further messages of an ended session do not count.
        if host is None or node not in self._run.links.sessions:
            return
        text = str(error) if isinstance(error, (FrameError, ClusterctlError)) else repr(error)
        self._count_violation(node, text[:_QUOTED])
        self.mark_disconnected(host, AgentError(node, f"it sent an invalid message: {text[:_QUOTED]}"))

    def _count_violation(self, node: str, text: str) -> None:
        run, node_state = self._run, self._run.state.nodes.get(node)
        if self._violations.is_new_message(node, text):
            run.record_note(f"{node} sent an invalid message, so its session is ended: {text}")
        over = self._violations.add_violation(node, time.monotonic())
        if over and node_state is not None and node_state.link != "lost" and not node_state.swept:
            run.record_event(
                controller_events.LinkChanged(node=node, link="lost", why=f"it sends invalid messages: {text}")
            )

    # --- broken

    def on_session_lost(self, lost: SessionLost) -> None:
        """Record that a session ended, and redial the node."""
        host = self._run.hosts.get(lost.node)
        if host is not None and self._run.links.is_connection_broken(lost.node):
            if isinstance(lost.error, ProtocolError):
                self._count_violation(lost.node, str(lost.error).removeprefix(f"{lost.node}: "))
            self.mark_disconnected(host, lost.error)

    def mark_disconnected(self, host: HostSpec, error: ClusterctlError, session: Session | None = None) -> None:
        """Record that a node has no connection, and redial the node. Ignore an outdated `session`."""
        run = self._run
        if session is not None and run.links.sessions.get(host.name) is not session:
            return
        node = run.state.nodes.get(host.name)
        silent = node is not None and node.link == "unreachable" and node.link_why == _SILENT
        if node is not None and (silent or node.link not in ("unreachable", "lost")):
            self._record_unreachable(host.name, str(error), run.links.measure_silence_s(0.0).get(host.name, 0.0))
        run.links.redial(host, session)

    # --- back

    def require_replica_comparison(self, nodes: Iterable[str]) -> None:
        """Make the next subscription compare all replicas of these nodes, which another controller wrote."""
        self._uncompared.update(nodes)

    def on_reconnect(self, name: str, session: Session) -> None:
        """Add a redialed session, and resume its node."""
        run = self._run
        node = run.find_node(name)
        if not run.add_session(name, session) or node is None:
            return
        if name in run.state.nodes:
            self._record_reconnect(node, str(session.hello.get("boot_id") or ""))
        state = run.state
        run.executor.run_in_thread(
            lambda: self._resume(state, node, session),
            lambda outcome: self._on_resumed(name, session, outcome),
            lambda error: self._on_resume_failed(name, session, error),
        )

    def _record_reconnect(self, node: NodeState, boot: str) -> None:
        if boot and node.boot and boot != node.boot and not node.swept:
            why = "it was rebooted"
            self._run.record_event(controller_events.LinkChanged(node=node.node, link="lost", why=why, rebooted=True))
        elif node.link != "lost":
            self._run.record_event(controller_events.LinkChanged(node=node.node, link="connected"))

    def _resume(self, state: RunState, node: NodeState, session: Session) -> _Resumption:
        """Subscribe to the bytes of a node's files that the replicas lack. Runs in a thread, so it changes no state."""
        run, name = self._run, node.node
        earlier = name in self._uncompared
        differing = replication.find_stale_replicas(
            run.folder, name, session, state.attempt, include_earlier_attempts=earlier
        )
        follow = run.executor.call_on_loop(lambda: self._build_follow(name, session, differing))
        try:
            FOLLOW.call(session, follow)
        except NotFoundError:
            # The node has lost the files of the run, but workers may still run. End these workers.
            remaining = run_end_on_nodes.end_run_on_node(session, run.folder.run, name, run.grace)
            return _Resumption(has_files=False, remaining=remaining)
        pending = any(state.workers[r].phase is WorkerPhase.PENDING for r in node.ranks if r in state.workers)
        status = STATUS.call(session, {"run": run.folder.run, "node": name}) if pending else None
        return _Resumption(has_files=True, status=status)

    def _build_follow(self, node: str, session: Session, differing: list[str]) -> run_requests.FollowArguments:
        """Return the subscription request for a node. The node sends the files in `differing` from their first byte."""
        if self._run.links.sessions.get(node) is not session:
            raise ConnectError(node, "the connection was lost")
        for file in differing:
            self._run.writer.restart_replica(node, file)
        if differing:
            self._run.subscriptions.mark_replicated_before(node, 0)
        self._uncompared.discard(node)
        return self._run.subscriptions.build_request(node)

    def _on_resumed(self, node: str, session: Session, outcome: _Resumption) -> None:
        """Handle a resumed node; repeat a stop request that the node may have missed."""
        run, node_state = self._run, self._run.find_node(node)
        if outcome.has_files:
            run.subscriptions.mark_subscribed({node: session})
            self._stale.discard(node)
        if run.links.sessions.get(node) is not session or node_state is None or node_state.swept:
            return
        if not outcome.has_files:
            self._on_run_files_lost(node, session, outcome.remaining)
        elif node in run.state.retired:
            run.stop_node(node, StopReason.NODE_LOST.value)
        elif run.state.reason is not None:
            run.stop_node(node, run.state.reason)
        elif outcome.status is not None:
            self._end_unstarted_attempt(node, outcome.status)

    def _on_resume_failed(self, node: str, session: Session, error: Exception) -> None:
        """Redial a node that could not be resumed, unless the node has a newer controller."""
        if isinstance(error, StaleEpochError):
            if self._run.links.sessions.get(node) is session:
                self.on_stale_epoch(node)
            return
        if not isinstance(error, ClusterctlError):
            error = ConnectError(node, f"its run cannot be followed: {error}")
        self.mark_disconnected(self._run.hosts[node], error, session)

    def _on_run_files_lost(self, node: str, session: Session, remaining: list[RemainingProcess]) -> None:
        run = self._run
        why = "it has lost the files of the run"
        run.record_event(controller_events.LinkChanged(node=node, link="lost", why=why, rebooted=not remaining))
        if remaining:
            run.links.redial(run.hosts[node], session)

    def _end_unstarted_attempt(self, node: str, status: StatusAnswer) -> None:
        """End an attempt if the previous controller ended before it had started the workers on this node."""
        run = self._run
        if status["state"] == "prepared" and status["attempt"] == run.state.attempt and not run.is_busy:
            text = f"the controller ended before it had started the workers on {node}"
            run.end_partly_started_attempt(RunFailed(text, exit_code=ExitCode.FAILED))

    # --- silent

    def record_silent_nodes(self) -> None:
        """Record the nodes that became silent, and the nodes that answer again."""
        run = self._run
        silent = run.links.measure_silence_s(SILENT_AFTER_S)
        for node in run.state.nodes.values():
            seconds = silent.get(node.node)
            if (node.swept and node.finished) or node.link == "lost":
                continue
            if seconds is not None and node.link != "unreachable":
                self._record_unreachable(node.node, _SILENT, seconds)
                run.control.notify_watchers()
            elif seconds is None and node.link != "connected" and node.node in run.links.sessions:
                run.record_event(controller_events.LinkChanged(node=node.node, link="connected"))
                run.control.notify_watchers()

    def _record_unreachable(self, node: str, why: str, seconds: float) -> None:
        """Record that a node is silent, and the times at which it will count as lost and its workers will stop."""
        run = self._run
        limits, alone = run.limits, len(run.state.nodes) == 1
        run.record_event(
            controller_events.LinkChanged(
                node=node,
                link="unreachable",
                why=why,
                seconds=seconds,
                # In a run of one node, the node is never lost, because the network of the head may be broken.
                lost_in=None if alone else max(0.0, limits.node_lost_after - seconds),
                stop_in=None if limits.stop_after is None else max(0.0, limits.stop_after - seconds),
            )
        )
