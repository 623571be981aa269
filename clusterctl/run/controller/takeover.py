"""How a controller takes over a run that had one: it reaches the nodes, finds its epoch, goes on with each of them."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError, ConnectError, ExitCode, RunFailed
from clusterctl.run.controller.beginning import UNHEARD
from clusterctl.run.nodes import attempt_begin, ending
from clusterctl.run.nodes.fan_out import each, names
from clusterctl.run.nodes.launch import NotBegun
from clusterctl.run.nodes.links import Redialed
from clusterctl.run.nodes.progress import Progress
from clusterctl.run.rules import controller_events
from clusterctl.session.requests import STATUS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.agent.protocol.command_types import StatusAnswer
    from clusterctl.config.spec import HostSpec
    from clusterctl.run.controller.beginning import Beginning
    from clusterctl.run.controller.connections import Connections
    from clusterctl.run.controller.run import ControlledRun
    from clusterctl.session.session import Session

_PATIENCE = 20.0
"""Seconds after which the nodes that are there do not wait any longer for those that are not."""
_NOT_BEGUN = ("new", "prepared", "finished")
"""What a node says of a run none of whose workers it was asked to start, or that is over."""


class TakeOver:
    """Takes a run over. No session is joined before all, or most, have been reached: until then there is no epoch.

    Args:
        run: The run.
        connections: Go on with the nodes.
        beginning: Ends a start that left no attempt behind.
    """

    def __init__(self, run: ControlledRun, connections: Connections, beginning: Beginning) -> None:
        self._run, self._connections, self._beginning = run, connections, beginning
        self._hosts: Sequence[HostSpec] = ()
        self._reached: dict[str, Session] = {}
        self._statuses: dict[str, StatusAnswer | None] = {}
        self._until = 0.0
        self.active = False

    def begin(self) -> None:
        """Reach the nodes of the run; nothing is decided before `go_on` was called."""
        run = self._run
        self._hosts = self._hosts_to_reach()
        self._until = time.monotonic() + _PATIENCE
        self.active = run.launching = True
        run.aside(self._reach, self._all_tried, _end_controller)

    def go_on_when_due(self) -> None:
        """Go on without the nodes that take too long."""
        if self.active and time.monotonic() >= self._until:
            self._go_on({})

    # --- in threads

    def _reach(self) -> dict[str, Any]:
        """Dial all nodes at once, and ask how the run is there; return why some cannot be had."""
        run = self._run
        step = Progress("connect", len(self._hosts), run.post)

        def joined(node: str, session: Session) -> None:
            status: StatusAnswer | None = None
            with contextlib.suppress(ClusterctlError):
                status = STATUS.call(session, {"run": run.folder.run, "node": node})
            run.do_soon(lambda: self._came(node, session, status))

        opened, errors = run.dial_all(self._hosts, step, joined)
        step.end(names(opened), failed=bool(errors))
        return errors

    def _undo_start(self, opened: Mapping[str, Session]) -> NotBegun:
        """Undo on every node what a controller left that died before its first attempt was written down."""
        run = self._run
        # A node that never heard of the run keeps at least the epoch from which on it hears nothing of it.
        run.post(controller_events.TouchedNodes(nodes=list(opened)))
        left, _ = each(opened, lambda n, s: ending.end_on_node(s, run.folder.run, n, run.grace))
        unheard = [host.name for host in run.spec.hosts if host.name not in left]
        if unheard:
            run.post(controller_events.Note(text=UNHEARD.format(names(unheard)), level="warn"))
        error = RunFailed("its controller ended during the start", exit_code=ExitCode.FAILED)
        return NotBegun(
            error=error, prepared=(), remaining=tuple(entry for remaining in left.values() for entry in remaining)
        )

    # --- in the loop

    def _hosts_to_reach(self) -> tuple[HostSpec, ...]:
        run, state = self._run, self._run.state
        if state.attempt < 0:
            return run.spec.hosts
        waiting = [h.name for h in run.spec.spares] if run.spec.restart.max_restarts else []
        wanted = dict.fromkeys([*state.nodes, *state.next_nodes, *state.retired, *waiting])
        return tuple(run.hosts[n] for n in wanted if n in run.hosts)

    def _came(self, node: str, session: Session, status: StatusAnswer | None) -> None:
        if self.active:
            self._reached[node], self._statuses[node] = session, status
        elif node in self._run.links.sessions:
            session.close()
        else:
            self._run.raise_epoch(_epoch(status))
            self._connections.distrust([node])
            self._connections.back(Redialed(node=node, session=session))

    def _all_tried(self, errors: dict[str, Any]) -> None:
        if self.active:
            self._go_on(errors)

    def _go_on(self, errors: Mapping[str, ClusterctlError]) -> None:
        run = self._run
        self.active = False
        run.raise_epoch(max(map(_epoch, self._statuses.values()), default=0))
        self._believe()
        if run.state.attempt < 0:
            for node, session in self._reached.items():
                run.join(node, session)
            self._beginning.launch(lambda: self._undo_start(self._reached))
            return
        run.launching = False
        self._connections.distrust(self._reached)
        for host in self._hosts:
            if host.name in self._reached:
                self._connections.back(Redialed(node=host.name, session=self._reached[host.name]))
            else:
                late = ConnectError(host.name, f"no answer within {_PATIENCE:g}s")
                self._connections.missing(host, errors.get(host.name, late))

    def _believe(self) -> None:
        """Write down the attempt that nodes have begun, where the head lost the line that said so in a crash."""
        run = self._run
        begun = [
            status["attempt"] for status in self._statuses.values() if status and status["state"] not in _NOT_BEGUN
        ]
        number = max(begun, default=-1)
        attempt = attempt_begin.stored(run.folder, number) if number > run.state.attempt else None
        if attempt is not None:
            run.note(f"the head had lost the begin of attempt {number}, which its nodes know of")
            run.record(attempt)


def _epoch(status: StatusAnswer | None) -> int:
    return (status and status["epoch"]) or 0


def _end_controller(error: Exception) -> None:
    """Leave a run alone that could not be taken over: it goes on, and the next controller may have more luck."""
    raise error
