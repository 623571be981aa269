"""What becomes of the links to the nodes: shown early if one breaks, followed again from the cursors if it is back."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

from clusterctl.agent.protocol import command_types, requests
from clusterctl.agent.protocol.command_types import StatusAnswer
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.record_types import RemainingProcess
from clusterctl.agent.protocol.requests import StopReason
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
from clusterctl.run.controller.links import Redialed
from clusterctl.run.controller.run import ControlledRun
from clusterctl.run.nodes import run_cleanup
from clusterctl.run.record.clock import read_head_time
from clusterctl.run.record.ownership import ThreadOwnedState
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.policy import ViolationCounter
from clusterctl.run.rules.state import NodeState, RunState, WorkerPhase
from clusterctl.session.errors import ProtocolError, StaleEpochError
from clusterctl.session.inbox import ClockMeasured, SessionLost
from clusterctl.session.requests import FOLLOW, STATUS
from clusterctl.session.session import Session

SILENT_AFTER_S = 6.5
_QUOTED = 300
_AHEAD_STEP = 0.1
"""Seconds by which a wall clock has to move before that is written down: times of output are no more exact."""
_SILENT = "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Followed:
    """A node is followed again. `status` is its answer where somebody has to know whether its workers were started."""

    status: StatusAnswer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunFilesLost:
    """A node lost the files of the run; `left` has the processes of the run that still live there."""

    left: list[RemainingProcess]


class Connections(ThreadOwnedState):
    """Records what becomes of the links of a run, and resumes nodes that are back.

    Thread: the loop; `_resume` works in a thread for each session.

    Attributes:
        is_superseded: Another controller commands the run from elsewhere; this one must not act any more.
    """

    def __init__(self, run: ControlledRun) -> None:
        self._run = run
        self._uncompared: set[str] = set()
        self._stale: set[str] = set()
        self._violations = ViolationCounter()
        self.is_superseded = False

    def record_clock(self, item: ClockMeasured) -> None:
        """Keep the best estimate of how far a node's clock is from ours."""
        node = self._run.state.nodes.get(item.node)
        if node is None:
            return
        offset = read_head_time() - time.monotonic() - item.mono_offset_s
        # In the clock of all events, which does not follow where somebody sets the head's.
        ahead = item.wall_offset_s + time.time() - read_head_time()
        if (
            node.clock is None
            or item.error_s < node.clock[1] / 2
            or abs(offset - node.clock[0]) > 5 * node.clock[1] + 0.005
            or abs(ahead - node.ahead) > item.error_s + _AHEAD_STEP
        ):
            self._run.record(
                controller_events.Clock(node=item.node, offset=offset, error=item.error_s, boot=item.boot, ahead=ahead)
            )

    # --- another controller

    def on_stale_epoch(self, node: str) -> None:
        """End the session with a node that obeys a later controller; with no other session left, this controller ends.

        One node alone cannot end the control of the others: it may be wrong.
        """
        run = self._run
        if node not in run.links.sessions:
            return
        self._stale.add(node)
        run_nodes = set(run.all_nodes()) or set(run.hosts)
        if run.links.sessions.keys() & run_nodes <= self._stale:
            self.is_superseded = True
            run.note(f"another controller has taken over on {node}: this one has ended and the run goes on")
        else:
            text = "it says that another controller has taken over, and no other node knows of one"
            self.on_invalid_message(node, FrameError(text))

    # --- not to be believed

    def on_invalid_message(self, node: str, error: Exception) -> None:
        """End the session of a node that said what cannot be: a few times it is asked anew, then it counts as lost."""
        host = self._run.hosts.get(node)
        if not isinstance(error, (FrameError, ClusterctlError)):
            # For the log of the controller.
            traceback.print_exception(error)
        # What is left in the inbox of a session that has been ended counts once.
        if host is None or node not in self._run.links.sessions:
            return
        text = str(error) if isinstance(error, (FrameError, ClusterctlError)) else repr(error)
        self._count_violation(node, text[:_QUOTED])
        self.mark_missing(host, AgentError(node, f"it said what cannot be: {text[:_QUOTED]}"))

    def _count_violation(self, node: str, text: str) -> None:
        run, node_state = self._run, self._run.state.nodes.get(node)
        if self._violations.is_new(node, text):
            run.note(f"{node} said what cannot be, so its session is ended: {text}")
        over = self._violations.add(node, time.monotonic())
        if over and node_state is not None and node_state.link != "lost" and not node_state.swept:
            run.record(controller_events.Link(node=node, link="lost", why=f"it says what cannot be: {text}"))

    # --- broken

    def on_session_lost(self, item: SessionLost) -> None:
        """Record that a session ended, and dial again."""
        host = self._run.hosts.get(item.node)
        if host is not None and self._run.links.is_broken(item.node):
            if isinstance(item.error, ProtocolError):
                self._count_violation(item.node, str(item.error).removeprefix(f"{item.node}: "))
            self.mark_missing(host, item.error)

    def mark_missing(self, host: HostSpec, error: ClusterctlError, session: Session | None = None) -> None:
        """Take note that a node has no connection (`session`: that this one is of no use), and dial until it has."""
        run = self._run
        if session is not None and run.links.sessions.get(host.name) is not session:
            return
        node = run.state.nodes.get(host.name)
        silent = node is not None and node.link == "unreachable" and node.link_why == _SILENT
        if node is not None and (silent or node.link not in ("unreachable", "lost")):
            self._record_unreachable(host.name, str(error), run.links.list_silent(0.0).get(host.name, 0.0))
        run.links.redial(host, session)

    # --- back

    def require_full_compare(self, nodes: Iterable[str]) -> None:
        """Compare all replicas of these nodes before they are followed: another controller wrote them."""
        self._uncompared.update(nodes)

    def on_reconnect(self, item: Redialed) -> None:
        """Accept a session that was dialed again, and resume its node."""
        run = self._run
        node = run.find_node(item.node)
        if not run.join(item.node, item.session) or node is None:
            return
        if item.node in run.state.nodes:
            self._record_reconnect(node, str(item.session.hello.get("boot_id") or ""))
        state = run.state
        run.executor.in_thread(lambda: self._resume(state, node, item.session)).then_on_loop(
            lambda outcome: self._on_resumed(item.node, item.session, outcome),
            lambda error: self._on_resume_failed(item.node, item.session, error),
        )

    def _record_reconnect(self, node: NodeState, boot: str) -> None:
        if boot and node.boot and boot != node.boot and not node.swept:
            why = "it was rebooted"
            self._run.record(controller_events.Link(node=node.node, link="lost", why=why, rebooted=True))
        elif node.link != "lost":
            self._run.record(controller_events.Link(node=node.node, link="connected"))

    def _resume(self, state: RunState, node: NodeState, session: Session) -> _Followed | _RunFilesLost:
        """Follow a node from the cursors. In a thread: the loop changes what has to be changed."""
        run, name = self._run, node.node
        earlier = name in self._uncompared
        differing = replication.find_stale_replicas(run.folder, name, session, state.attempt, earlier=earlier)
        follow = run.executor.call_on_loop(lambda: self._build_follow(name, session, differing))
        try:
            FOLLOW.call(session, follow)
        except NotFoundError:
            # A supervisor may have lost its files and not its workers: whatever is there is ended.
            return _RunFilesLost(left=run_cleanup.end_on_node(session, run.folder.run, name, run.grace))
        pending = any(state.workers[r].phase is WorkerPhase.PENDING for r in node.ranks if r in state.workers)
        request: command_types.RunArguments = {"run": run.folder.run, "node": name}
        return _Followed(status=STATUS.call(session, request) if pending else None)

    def _build_follow(self, node: str, session: Session, differing: list[str]) -> requests.Follow:
        """Return what to ask a node for; what differs is asked for from its start."""
        if self._run.links.sessions.get(node) is not session:
            raise ConnectError(node, "the connection was lost")
        for file in differing:
            self._run.writer.restart_replica(node, file)
        if differing:
            self._run.subscriptions.mark_replicated(node, 0)
        self._uncompared.discard(node)
        return self._run.subscriptions.build_request(node)

    def _on_resumed(self, node: str, session: Session, outcome: _Followed | _RunFilesLost) -> None:
        """Send again what a node may have missed."""
        run, node_state = self._run, self._run.find_node(node)
        if isinstance(outcome, _Followed):
            run.subscriptions.mark_subscribed({node: session})
            self._stale.discard(node)
        if run.links.sessions.get(node) is not session or node_state is None or node_state.swept:
            return
        if isinstance(outcome, _RunFilesLost):
            self._on_run_files_lost(node, session, outcome.left)
        elif node in run.state.retired:
            run.stop(node, StopReason.NODE_LOST.value)
        elif run.state.reason is not None:
            run.stop(node, run.state.reason)
        elif outcome.status is not None:
            self._end_unstarted_attempt(node, outcome.status)

    def _on_resume_failed(self, node: str, session: Session, error: Exception) -> None:
        """Try it once more with another session, unless the node obeys another controller now."""
        if isinstance(error, StaleEpochError):
            if self._run.links.sessions.get(node) is session:
                self.on_stale_epoch(node)
            return
        if not isinstance(error, ClusterctlError):
            error = ConnectError(node, f"its run cannot be followed: {error}")
        self.mark_missing(self._run.hosts[node], error, session)

    def _on_run_files_lost(self, node: str, session: Session, left: list[RemainingProcess]) -> None:
        run = self._run
        why = "it has no trace of the run any more"
        run.record(controller_events.Link(node=node, link="lost", why=why, rebooted=not left))
        if left:
            run.links.redial(run.hosts[node], session)

    def _end_unstarted_attempt(self, node: str, status: StatusAnswer) -> None:
        """End an attempt whose workers on a node nobody will start: the controller that was about to is gone."""
        run = self._run
        if status["state"] == "prepared" and status["attempt"] == run.state.attempt and not run.is_busy:
            text = f"the controller ended before it had started the workers on {node}"
            run.end_start(RunFailed(text, exit_code=ExitCode.FAILED))

    # --- silent

    def record_silence(self) -> None:
        """Record which nodes became silent, and which answer again."""
        run = self._run
        silent = run.links.list_silent(SILENT_AFTER_S)
        for node in run.state.nodes.values():
            seconds = silent.get(node.node)
            if (node.swept and node.finished) or node.link == "lost":
                continue
            if seconds is not None and node.link != "unreachable":
                self._record_unreachable(node.node, _SILENT, seconds)
                run.control.notify()
            elif seconds is None and node.link != "connected" and node.node in run.links.sessions:
                run.record(controller_events.Link(node=node.node, link="connected"))
                run.control.notify()

    def _record_unreachable(self, node: str, why: str, seconds: float) -> None:
        """Record that a node has not been heard for so long, and what follows from that by itself, and when."""
        run = self._run
        limits, alone = run.limits, len(run.state.nodes) == 1
        run.record(
            controller_events.Link(
                node=node,
                link="unreachable",
                why=why,
                seconds=seconds,
                # Where no other node could be heard it would be our own link.
                lost_in=None if alone else max(0.0, limits.node_lost_after - seconds),
                stop_in=None if limits.stop_after is None else max(0.0, limits.stop_after - seconds),
            )
        )
