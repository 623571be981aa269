"""The wait for GPUs before the first attempt: in line with all other runs that wait for the same GPUs.

A run takes one number on all its nodes, above all numbers there. Each node tells the run who is ahead. The run claims
only once enough nodes are ready, all of them at once, so it never holds a GPU while it waits for another one.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future

from clusterctl.agent.protocol.command_payload_types import QueueAnswer, QueueArguments
from clusterctl.config.spec import ClusterSpec
from clusterctl.errors import ClusterctlError, NodeError, RefusedError
from clusterctl.formatting import describe_duration
from clusterctl.plan.layout import choose_ready_nodes, list_claimed_gpus
from clusterctl.run.controller.controlled_run import ControlledRun
from clusterctl.run.nodes.fan_out import CancelledError, call_all, select_sessions
from clusterctl.run.nodes.network_probe import build_node_facts
from clusterctl.run.rules.controller_events import WAIT_STEP, StartStepProgress
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import QUEUE

_LOOK_S = 1.0
"""Seconds after which the wait looks for a cancelled run, and for nodes that are connected again."""
_MAX_REFUSALS = 20
"""The most refused claims in a row. A run that claims at the same moment refuses only for a moment."""


class GpuWait:
    """Looks at the GPUs of a run's nodes, and waits for them.

    Thread: the launch thread.

    Args:
        run: The run.
    """

    def __init__(self, run: ControlledRun) -> None:
        self._run = run
        self._number: int | None = None
        self._views: dict[str, QueueAnswer] = {}
        self._pending: dict[str, tuple[Session, Future[QueueAnswer]]] = {}
        self._answered = threading.Event()

    @property
    def busy(self) -> dict[str, str]:
        """The nodes on which other runs hold or await GPUs of this run, each with a sentence."""
        return {node: describe_view(view) for node, view in self._views.items() if not is_ready(view)}

    def survey(self, nodes: Collection[str]) -> None:
        """Ask these nodes once who uses their GPUs.

        Raises:
            ClusterctlError: A node does not answer, or refuses to answer.
        """
        self._views = self._ask_all(nodes, claim=False)

    def wait(self, max_wait_s: float) -> ClusterSpec:
        """Wait until enough nodes have free GPUs, and claim them; return the spec in which the other nodes are spares.

        Raises:
            RefusedError: The wait took too long, or a node refuses the wait.
            CancelledError: The user cancelled the run.
        """
        run, began = self._run, time.monotonic()
        nodes = [host.name for host in run.spec.worker_hosts if host.name in run.links.sessions]
        views = self._ask_all(nodes, claim=False)
        self._number = 1 + max(view["highest"] for view in views.values())
        claim_at, refusals = began, 0
        shown: dict[str, str] = {}
        while True:
            self._exchange(nodes)
            # Until each connected node has answered, a run with `min_nodes` would begin with the fastest ones.
            has_all = all(node in self._views or node not in run.links.sessions for node in nodes)
            ready = [node for node in nodes if node in self._views and is_ready(self._views[node])]
            chosen = choose_ready_nodes(run.spec, ready) if has_all else None
            moment = time.monotonic()
            if chosen is not None and moment >= claim_at:
                error = self._claim(chosen, nodes)
                if error is None:
                    if shown:
                        self._show(ready, began, ended=True)
                    return chosen
                refusals += isinstance(error, RefusedError)
                if refusals > _MAX_REFUSALS:
                    raise error
                claim_at = time.monotonic() + random.uniform(0.5, 1.5) * _LOOK_S
                continue
            if len(self._views) == len(nodes) and self.busy != shown and chosen is None:
                shown, refusals = self.busy, 0
                self._show(ready, began)
            if moment - began > max_wait_s:
                self._show(ready, began, ended=True, failed=True)
                busy = "; ".join(f"{node}: {text}" for node, text in self.busy.items())
                raise RefusedError(f"waited {describe_duration(max_wait_s)} for GPUs; {busy}")

    def _claim(self, chosen: ClusterSpec, nodes: Collection[str]) -> ClusterctlError | None:
        """Claim the GPUs of all chosen nodes, and leave the line on the others; or claim none and return the reason."""
        names = [host.name for host in chosen.worker_hosts]
        try:
            self._ask_all(names, claim=True)
        except ClusterctlError as error:
            for node in names:
                self._pending.pop(node, None)
                self._views.pop(node, None)
            return error
        self.leave(node for node in nodes if node not in names)
        return None

    def leave(self, nodes: Iterable[str]) -> None:
        """Give back the places and the claims on nodes that the run does not use."""
        number, self._number = self._number, None
        # A lost session has no ticket, and a node that refuses to answer has removed it first.
        with contextlib.suppress(ClusterctlError):
            self._ask_all([node for node in nodes if node in self._run.links.sessions], claim=False)
        self._number = number

    def _exchange(self, nodes: Collection[str]) -> None:
        """Ask each node that owes no answer, then wait for an answer, and take all that have arrived."""
        sessions = self._run.links.sessions
        for node in nodes:
            session = sessions.get(node)
            if session is None or (node in self._pending and self._pending[node][0] is session):
                continue
            future = QUEUE.call_async(session, self._build_request(node, session, claim=False))
            self._pending[node] = session, future
            future.add_done_callback(lambda _: self._answered.set())
        self._answered.wait(_LOOK_S)
        self._answered.clear()
        if self._run.cancelled.is_set():
            raise CancelledError("cancelled during the start")
        for node, (_, future) in [item for item in self._pending.items() if item[1][1].done()]:
            del self._pending[node]
            self._views.pop(node, None)
            try:
                self._views[node] = future.result()
            except NodeError:
                continue

    def _ask_all(self, nodes: Collection[str], *, claim: bool) -> dict[str, QueueAnswer]:
        def ask(node: str, session: Session) -> QueueAnswer:
            return QUEUE.call(session, self._build_request(node, session, claim=claim))

        views, errors = call_all(select_sessions(self._run.links.sessions, nodes), ask)
        for error in errors.values():
            raise error
        return views

    def _build_request(self, node: str, session: Session, *, claim: bool) -> QueueArguments:
        run = self._run
        host = run.hosts[node]
        return {
            "run": run.folder.run,
            "node": node,
            "gpus": list(list_claimed_gpus(host, build_node_facts(host, session.hello).gpus)),
            "number": self._number,
            "claim": claim,
            "name": run.spec.name,
            "head": os.uname().nodename,
        }

    def _show(self, ready: Collection[str], began: float, *, ended: bool = False, failed: bool = False) -> None:
        spec, seconds = self._run.spec, time.monotonic() - began
        event = StartStepProgress(
            name=WAIT_STEP,
            done=len(ready),
            total=spec.min_nodes or len(spec.worker_hosts),
            waiting=[[node, text] for node, text in self.busy.items()],
            seconds=seconds,
            ended=ended,
            failed=failed,
        )
        self._run.post_event(event)


def is_ready(view: QueueAnswer) -> bool:
    """Return whether nobody holds the GPUs of a node, and nobody comes first."""
    return not view["holders"] and not view["ahead"]


def describe_view(view: QueueAnswer) -> str:
    """Return a sentence about what a run waits for on a node."""
    place = f"place {len(view['ahead']) + 1} in line, after {view['ahead'][-1]}" if view["ahead"] else ""
    return ", ".join([*view["holders"], *([place] if place else [])])
