"""Adopts a run that lost its controller: connects to the nodes, raises the epoch, resumes each node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from clusterctl.agent.protocol.command_payload_types import StatusAnswer
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import HostSpec
from clusterctl.errors import ClusterctlError, ConnectError, ExitCode, RunFailed
from clusterctl.run.controller.attempts import CLEANUP_UNCONFIRMED, StartSequence
from clusterctl.run.controller.controlled_run import ControlledRun
from clusterctl.run.controller.reconnection import Reconnection
from clusterctl.run.nodes import attempt_start, run_end_on_nodes
from clusterctl.run.nodes.attempt_start import StartFailure
from clusterctl.run.nodes.fan_out import Progress, call_all
from clusterctl.run.record.thread_ownership import ThreadOwnedAttributes
from clusterctl.run.rules import controller_events
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import STATUS

_CONNECT_GRACE_S = 20.0
"""Seconds that the adoption waits for nodes that do not answer."""
_UNSTARTED_STATES = ("new", "prepared", "finished")
"""The states of a run on a node before its workers were started, or after it has ended."""


class RunAdoption(ThreadOwnedAttributes):
    """Adopts a run.

    Sessions are added once all nodes have answered or the wait is over. Until then the new epoch is unknown.

    Thread: the loop. The methods under "in threads" run in other threads.

    Args:
        run: The run.
        reconnection: The object that resumes the nodes.
        start: The object that undoes a start without an attempt.
    """

    def __init__(self, run: ControlledRun, reconnection: Reconnection, start: StartSequence) -> None:
        self._run, self._reconnection, self._start = run, reconnection, start
        self._hosts: Sequence[HostSpec] = ()
        self._reached: dict[str, Session] = {}
        self._statuses: dict[str, StatusAnswer | None] = {}
        self._until = 0.0
        self.is_active = False

    def start(self) -> None:
        """Connect to the nodes of the run in a thread, which then calls `_continue`."""
        run = self._run
        self._hosts = self._list_hosts()
        self._until = time.monotonic() + _CONNECT_GRACE_S
        self.is_active = run.is_busy = True
        run.executor.run_in_thread(self._connect_all, self._continue, self._end_controller)

    def continue_without_late_nodes(self) -> None:
        """Continue without the nodes that have not answered in time."""
        if time.monotonic() >= self._until:
            self._continue({})

    # --- in threads

    def _connect_all(self) -> dict[str, Any]:
        """Connect to all nodes at once, and request the status of the run; return the errors."""
        run = self._run
        step = Progress("connect", len(self._hosts), run.post_event)

        def joined(node: str, session: Session) -> None:
            status: StatusAnswer | None = None
            with contextlib.suppress(ClusterctlError):
                status = STATUS.call(session, {"run": run.folder.run, "node": node})
            run.executor.call_soon(lambda: self._on_connected(node, session, status))

        opened, errors = run.dial_all(self._hosts, step, joined)
        step.end(fold_hosts(opened), failed=bool(errors))
        return errors

    def _undo_start(self, opened: Mapping[str, Session]) -> StartFailure:
        """Undo a start on every node. Its controller died before the first attempt was recorded."""
        run = self._run
        # Even a node that does not know the run stores the new epoch, so that the node refuses late requests for the
        # run.
        run.post_event(controller_events.TouchedNodes(nodes=list(opened)))
        left, _ = call_all(opened, lambda n, s: run_end_on_nodes.end_run_on_node(s, run.folder.run, n, run.grace))
        unheard = [host.name for host in run.spec.hosts if host.name not in left]
        if unheard:
            run.post_note(CLEANUP_UNCONFIRMED.format(fold_hosts(unheard)))
        error = RunFailed("its controller ended during the start", exit_code=ExitCode.FAILED)
        return StartFailure(error=error, remaining=tuple(entry for remaining in left.values() for entry in remaining))

    # --- in the loop

    def _list_hosts(self) -> tuple[HostSpec, ...]:
        run, state = self._run, self._run.state
        if state.attempt < 0:
            return run.spec.hosts
        waiting = [h.name for h in run.spec.spare_hosts] if run.spec.restart.max_restarts else []
        wanted = dict.fromkeys([*state.nodes, *state.next_nodes, *state.retired, *waiting])
        return tuple(run.hosts[n] for n in wanted if n in run.hosts)

    def _on_connected(self, node: str, session: Session, status: StatusAnswer | None) -> None:
        if self.is_active:
            self._reached[node], self._statuses[node] = session, status
        elif node in self._run.links.sessions:
            session.close()
        else:
            self._run.raise_epoch(_read_epoch(status))
            self._reconnection.require_replica_comparison([node])
            self._reconnection.on_reconnect(node, session)

    def _continue(self, errors: Mapping[str, ClusterctlError]) -> None:
        if not self.is_active:
            return
        run = self._run
        self.is_active = False
        run.raise_epoch(max(map(_read_epoch, self._statuses.values()), default=0))
        self._restore_attempt()
        if run.state.attempt < 0:
            for node, session in self._reached.items():
                run.add_session(node, session)
            self._start.run_in_launch_thread(lambda: self._undo_start(self._reached))
            return
        run.is_busy = False
        self._reconnection.require_replica_comparison(self._reached)
        for host in self._hosts:
            if host.name in self._reached:
                self._reconnection.on_reconnect(host.name, self._reached[host.name])
            else:
                late = ConnectError(host.name, f"no answer within {_CONNECT_GRACE_S:g}s")
                self._reconnection.mark_disconnected(host, errors.get(host.name, late))

    def _end_controller(self, error: Exception) -> None:
        """End this controller with the error. The run continues, and another controller may adopt it."""
        raise error

    def _restore_attempt(self) -> None:
        """Record an attempt again if nodes have begun the attempt, but the head lost its event in a crash."""
        run = self._run
        begun = [
            status["attempt"]
            for status in self._statuses.values()
            if status and status["state"] not in _UNSTARTED_STATES
        ]
        number = max(begun, default=-1)
        attempt = attempt_start.load_attempt_event(run.folder, number) if number > run.state.attempt else None
        if attempt is not None:
            run.record_note(f"the head had lost the record of attempt {number}, which its nodes have begun")
            run.record_event(attempt)


def _read_epoch(status: StatusAnswer | None) -> int:
    return (status and status["epoch"]) or 0
