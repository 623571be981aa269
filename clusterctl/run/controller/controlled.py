"""One run as its controller has it: its state, the only way to change it, and what is sent to its nodes.

The thread of the loop owns the state. Other threads hand over what they found by `post` or `aside`.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from clusterctl.agent import protocol as wire
from clusterctl.agent.protocol import Command
from clusterctl.errors import ClusterctlError, NodeError
from clusterctl.run import events, policy
from clusterctl.run.control import ControlServer
from clusterctl.run.gaps import Gaps, Step
from clusterctl.run.launch import Launch, Progress
from clusterctl.run.links import Links, each, quietly
from clusterctl.run.reader import load_state
from clusterctl.run.state import apply_head, apply_node
from clusterctl.run.store import Writer, now

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.agent.protocol import StopReason
    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.run.state import NodeState
    from clusterctl.run.store import RunDir
    from clusterctl.session import EventReceived, Session

T = TypeVar("T")

Post = Callable[[events.ControllerEvent], None]
Dial = Callable[["HostSpec", Callable[[str], None]], "Session"]

CALL_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Then:
    """What the loop does now that another thread is through."""

    call: Callable[[], None]


class ControlledRun:
    """A run, and whom to ask for it.

    Args:
        folder: The run directory; this becomes its one writer.
        spec: What to run, with its secrets.
        dial: Makes, for an inbox, what opens a session to a host with a callback for progress.

    Attributes:
        inbox: What the loop takes its items from.
        launching: A launch thread is at work.
        cancelled: Set when a person has ended the run.
        kill: No grace any more.
        unfit: Spares that must not be used, and why, in a word.
    """

    def __init__(self, folder: RunDir, spec: ClusterSpec, dial: Callable[[queue.SimpleQueue[Any]], Dial]) -> None:
        self.folder, self.spec = folder, spec
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.dial = dial(self.inbox)
        self.writer = Writer(folder)
        self.links = Links(lambda host: self.dial(host, lambda _: None), self.inbox)
        self.hosts = {h.name: h for h in spec.hosts}
        self.limits = limits_of(spec)
        self.state = load_state(folder)
        self.epoch = 0
        self.launching = False
        self.cancelled = threading.Event()
        self.kill = False
        self._gaps = Gaps()
        self.unfit: dict[str, str] = {}
        self.launch = Launch(folder, spec, self.links.sessions, self.post, self.cancelled)
        self.control = ControlServer(folder.control_address(), self.inbox.put)

    def close(self) -> None:
        """Let go of every connection and file."""
        self.links.close()
        self.writer.close()
        self.control.close()

    # --- from other threads

    def post(self, event: events.ControllerEvent) -> None:
        """Record an event soon."""
        self.inbox.put(Then(call=lambda: self.record(event)))

    def aside(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Let a thread work; the loop does `then` with its result, or ends with its exception."""

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                self.inbox.put(Then(call=_raising(error)))
            else:
                self.inbox.put(Then(call=lambda: then(result)))

        threading.Thread(target=run, daemon=True).start()

    # --- the state

    def record(self, event: events.ControllerEvent) -> None:
        """Write an event into the controller's journal, and take it into the state."""
        moment = now()
        self.writer.append(event, moment)
        self.state = apply_head(self.state, moment, event)

    def note(self, text: str, level: str = "warn") -> None:
        """Record words for a person."""
        self.record(events.Note(text=text, level=level))

    def take(self, item: EventReceived) -> None:
        """Replicate an event of a node's journal, and take it into the state; nothing where it was seen before."""
        known = self.known(item.node)
        if known is None or item.stamp.seq <= known.seq:
            return
        match self._gaps.judge(item.node, known.seq, item.stamp.seq, self.links.sessions.get(item.node)):
            case Step.ASK_AGAIN:
                self._ask_again(item.node)
                return
            case Step.LEAVE:
                return
            case Step.HANG_UP:
                self.links.broken(self.hosts[item.node])
                return
            case Step.PASS_OVER:
                self.note(f"{item.node}: its journal lacks what came behind number {known.seq}")
            case Step.TAKE:
                pass
        self.writer.journal(item.node, item.record)
        self.state = apply_node(self.state, item.node, item.stamp, item.event)

    def _ask_again(self, node: str) -> None:
        def ask() -> None:
            with contextlib.suppress(ClusterctlError):
                self.follow(node)

        self.aside(ask, lambda _: self._gaps.asked_again(node))

    def known(self, node: str) -> NodeState | None:
        """Return what is known of a node of this attempt, or of an earlier one."""
        return self.state.nodes.get(node) or self.state.retired.get(node)

    def all_nodes(self) -> list[str]:
        """Return the nodes of this attempt and of earlier ones."""
        return [*self.state.nodes, *self.state.retired]

    def sessions(self) -> dict[str, Session]:
        """Return the sessions there are to nodes of this attempt."""
        return {n: s for n, s in self.links.sessions.items() if n in self.state.nodes}

    # --- to the nodes

    def dial_all(
        self, hosts: Iterable[HostSpec], step: Progress | None = None
    ) -> tuple[dict[str, Session], dict[str, Any]]:
        """Open a session to every host, all at once; return them and the errors of those that cannot be had."""
        by_name = {h.name: h for h in hosts}
        shown = step or Progress("connect", len(by_name), lambda _: None)

        def one(node: str, _: Any) -> Session:
            shown.at(node, "connecting")
            session = self.dial(by_name[node], lambda what: shown.at(node, what))
            shown.through(node)
            return session

        placeholder: dict[str, Any] = dict.fromkeys(by_name)
        return each(placeholder, one, self.spec.ssh.parallel)

    def join(self, opened: dict[str, Session]) -> None:
        """Take sessions as the run's own: what they ask for carries this controller's epoch."""
        for node, session in opened.items():
            session.epoch = self.epoch
            self.links.add(node, session)

    def follow(self, node: str) -> None:
        """Ask a node for everything after the cursors. Called from launch threads and from the loop."""
        known = self.known(node)
        request = wire.Follow(
            run=self.folder.run, node=node, seq=known.seq if known else 0, cursors=self.writer.cursors(node)
        )
        session = self.links.sessions.get(node)
        if session is not None:
            session.call(Command.FOLLOW, wire.to_wire(request), timeout=CALL_SECONDS)

    def end_attempt(self, reason: StopReason, message: str) -> None:
        """Decide the end of the attempt, once, and tell its nodes."""
        self.record(events.Decided(attempt=self.state.attempt, reason=reason.value, message=message))
        self.stop_all(reason.value)
        self.control.wake()

    def stop_all(self, reason: str) -> None:
        """Stop the attempt on every node that has something left of it."""
        for node in self.state.nodes.values():
            session = self.links.sessions.get(node.node)
            if session is not None and not node.swept:
                stop = functools.partial(self.stop_node, node.node, session, reason)
                threading.Thread(target=quietly, args=(stop,), daemon=True).start()

    def stop_node(self, node: str, session: Session, reason: str) -> None:
        """Stop the attempt on one node; again, to shorten the grace."""
        grace = 0.0 if self.kill else self.limits.grace
        request = wire.Stop(run=self.folder.run, node=node, grace=grace, reason=reason)
        session.call(Command.STOP, wire.to_wire(request), timeout=CALL_SECONDS)

    def finish_nodes(self, nodes: list[str], state: str, code: int) -> list[str]:
        """Tell nodes that the run has ended; return those that did not hear it."""
        sessions = {n: s for n in nodes if (s := self.links.sessions.get(n)) is not None}
        asked = {"run": self.folder.run, "state": state, "exit_code": code}
        _, errors = each(sessions, lambda n, s: s.call(Command.FINISH, {**asked, "node": n}, timeout=CALL_SECONDS))
        return [n for n in dict.fromkeys(nodes) if n not in sessions or isinstance(errors.get(n), NodeError)]

    def cancel(self, *, kill: bool) -> None:
        """End the run: gracefully, or at once."""
        self.cancelled.set()
        self.links.hurry()
        if kill and not self.kill:
            self.kill = True
            if self.state.reason is not None:
                self.stop_all(self.state.reason)


def _raising(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def limits_of(spec: ClusterSpec) -> policy.Limits:
    """Return what the policy needs of a spec."""
    job = spec.job
    assert job is not None, "a run has a job"
    return policy.Limits(
        grace=job.grace,
        finish_grace=job.finish_grace,
        max_duration=job.max_duration,
        node_lost_after=spec.network.node_lost_after,
        stop_after=spec.stop_after,
        stall_action=spec.stall.action,
        restart=spec.restart,
    )
