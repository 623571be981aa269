"""What becomes of a run's connections: shown early when one breaks, resumed from the cursors when it is back."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import StopReason
from clusterctl.errors import ClusterctlError
from clusterctl.run import events
from clusterctl.run.store import now

if TYPE_CHECKING:
    from clusterctl.run.controller.controlled import ControlledRun
    from clusterctl.run.links import Redialed
    from clusterctl.session import BeatReceived, Session, SessionLost

SHOWN_SILENT_AFTER = 6.5
_SILENT = "no answer"


class Connections:
    """Sees to the links of a run.

    Attributes:
        superseded: Another controller commands the run from elsewhere; this one must not act any more.
    """

    def __init__(self, run: ControlledRun) -> None:
        self._run = run
        self._boots: dict[str, str] = {}
        self.superseded = False

    def beat(self, item: BeatReceived) -> None:
        """Keep the best estimate of how far a node's clock is from ours."""
        node = self._run.state.nodes.get(item.node)
        if node is None:
            return
        self._boots[item.node] = item.boot
        offset = now() - time.monotonic() - item.mono_offset_s
        if (
            node.clock is None
            or item.error_s < node.clock[1] / 2
            or abs(offset - node.clock[0]) > 5 * node.clock[1] + 0.005
        ):
            self._run.record(events.Clock(node=item.node, offset=offset, error=item.error_s, boot=item.boot))

    def lost(self, item: SessionLost, *, over: bool) -> None:
        """Take note that a connection broke, and dial again; not for a run that is `over` and never had a node."""
        run = self._run
        host = run.hosts.get(item.node)
        if host is None or (over and not run.state.nodes):
            return
        node = run.state.nodes.get(item.node)
        silent = node is not None and node.link == "unreachable" and node.link_why == _SILENT
        if node is not None and (silent or node.link not in ("unreachable", "lost")):
            run.record(events.Link(node=item.node, link="unreachable", why=str(item.error)))
        run.links.broken(host)

    def taken_by_another(self, node: str) -> None:
        """Leave the run alone from now on, whatever was decided."""
        if not self.superseded:
            self.superseded = True
            self._run.note(f"another controller has taken over on {node}: this one has ended and the run goes on")

    def back(self, item: Redialed) -> None:
        """Take a connection in that was dialed again, and go on with its node."""
        run = self._run
        run.join({item.node: item.session})
        node = run.known(item.node)
        if node is None:
            return
        boot = str(item.session.hello.get("boot_id") or "")
        if self._boots.setdefault(item.node, boot) != boot and not node.swept and item.node in run.state.nodes:
            run.record(events.Link(node=item.node, link="lost", why="it was rebooted", rebooted=True))
        elif node.link != "lost" and item.node in run.state.nodes:
            run.record(events.Link(node=item.node, link="connected"))
        threading.Thread(target=self._resume, args=(item.node, item.session), daemon=True).start()

    def _resume(self, node: str, session: Session) -> None:
        """Go on with a node from the cursors, and repeat what it may have missed."""
        run = self._run
        with contextlib.suppress(ClusterctlError):
            self._compare_replicas(node, session)
            run.follow(node)
            state, known = run.state, run.known(node)
            if known is None or known.swept:
                return
            if node in state.retired:
                run.stop_node(node, session, StopReason.NODE_LOST.value)
            elif state.reason is not None:
                run.stop_node(node, session, state.reason)

    def _compare_replicas(self, node: str, session: Session) -> None:
        from clusterctl.run.replicas import differing

        for file in differing(self._run.folder, node, session):
            self._run.writer.restart_replica(node, file)

    def look(self) -> None:
        """Record which nodes fell silent, and which are heard again."""
        run = self._run
        silent = run.links.silent(SHOWN_SILENT_AFTER)
        for node in run.state.nodes.values():
            seconds = silent.get(node.node)
            if (node.swept and node.finished) or node.link == "lost":
                continue
            if seconds is not None and node.link != "unreachable":
                run.record(events.Link(node=node.node, link="unreachable", why=_SILENT, seconds=seconds))
                run.control.wake()
            elif seconds is None and node.link != "connected" and node.node in run.links.sessions:
                run.record(events.Link(node=node.node, link="connected"))
                run.control.wake()
