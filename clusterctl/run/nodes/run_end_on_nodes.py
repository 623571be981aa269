"""Ends a run that has no controller: stops it on each node, waits until its processes have ended, finishes it."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Iterable, Mapping

from clusterctl.agent.protocol import run_files, run_requests
from clusterctl.agent.protocol.command_payload_types import StatusAnswer
from clusterctl.agent.protocol.record_types import RemainingProcess
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.errors import ClusterctlError, ExitCode, NotFoundError, RefusedError
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.run.record.head_clock import read_head_time
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import load_state
from clusterctl.run.rules import controller_events, outcome
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import FINISH, READ, STATUS, STOP

_AFTER_GRACE_S = 30.0
"""Seconds that a node may take beyond the grace: for SIGKILL, the sweep and the kernel."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 0.5
_PIECE_BYTES = 1 << 20


def end_run_on_node(session: Session, run: str, node: str, grace: float) -> list[RemainingProcess]:
    """Stop and finish a run on one node; return the processes that could not be ended.

    The epoch of the session must be above every earlier one, so that the node refuses earlier controllers.

    Raises:
        ClusterctlError: The node did not answer in time.
    """
    stop = run_requests.StopArguments(run=run, node=node, grace=grace, reason=StopReason.CANCELLED.value)
    deadline = time.monotonic() + grace + _AFTER_GRACE_S
    pause = _FIRST_PAUSE_S
    STOP.call(session, stop)
    status = STATUS.call(session, {"run": run, "node": node})
    while not _is_ended(status) and time.monotonic() < deadline:
        # If the files of a supervisor were removed, it ignores the stop until it has created the files again.
        if not status["supervisor"] or status["state"] == "new":
            STOP.call(session, stop)
        time.sleep(pause)
        pause = min(pause * 2, _MAX_PAUSE_S)
        status = STATUS.call(session, {"run": run, "node": node})
    # The node refuses to finish while a process of the attempt still runs. This process is returned below.
    with contextlib.suppress(RefusedError):
        FINISH.call(session, {"run": run, "node": node, "state": "cancelled", "exit_code": int(ExitCode.CANCELLED)})
    return [{**one, "node": node} for one in status["remaining"]] or _unended(node, status)


def _unended(node: str, status: StatusAnswer) -> list[RemainingProcess]:
    """Return the workers of a node that did not end in time. If the node reports none, return an unknown process."""
    if _is_ended(status):
        return []
    unknown = outcome.build_remaining_process(node, None, outcome.OVERDUE)
    return [
        {**unknown, "pid": worker["pid"], "start_time": worker["start_time"], "why": "not ended in time"}
        for worker in status["workers"]
        if worker["alive"]
    ] or [unknown]


def _is_ended(status: StatusAnswer) -> bool:
    """Return whether the run has ended on a node. A node that lost its files reports only remaining processes."""
    if status["state"] == "new":
        return not status["remaining"]
    return status["state"] in ("prepared", "swept", "finished")


def fetch_missing_output(session: Session, writer: RunDirWriter, run: str, node: str, files: Iterable[str]) -> None:
    """Fetch the bytes of a node's files that the replicas lack.

    Raises:
        ClusterctlError: The node did not answer.
        OSError: The head has no space.
    """
    cursors = writer.list_cursors(node)
    for file in files:
        offset = cursors.get(file, 0)
        with contextlib.suppress(NotFoundError):
            while True:
                answer = READ.call(
                    session, {"run": run, "node": node, "file": file, "offset": offset, "length": _PIECE_BYTES}
                )
                data = base64.b64decode(answer["data"])
                if not data:
                    break
                offset = writer.replicate(node, file, int(answer["offset"]), data)


def end_run_without_controller(
    run: RunDir,
    state: RunState,
    sessions: Mapping[str, Session],
    unreached: Mapping[str, ClusterctlError],
    grace: float,
) -> RunState:
    """End a run on its nodes and fetch their output; return the new state.

    A run that has ended keeps its result. Any other run becomes cancelled.

    Args:
        run: The run directory.
        state: The state of the run.
        sessions: The sessions of nodes that may have remaining processes or files.
        unreached: The nodes that do not answer, and their errors.
        grace: Seconds from SIGTERM to SIGKILL.

    Raises:
        RefusedError: The run has a controller.
    """
    writer = RunDirWriter(run)
    try:
        epoch = writer.raise_epoch(find_highest_epoch(run.run, sessions))

        def end(node: str, session: Session) -> list[RemainingProcess]:
            session.epoch = epoch
            remaining = end_run_on_node(session, run.run, node, grace)
            # The run has ended even if its output cannot be fetched. The node still has the output.
            with contextlib.suppress(ClusterctlError, OSError):
                fetch_missing_output(session, writer, run.run, node, _list_output_files(state, node))
            return remaining

        by_node, errors = call_all(sessions, end)
        remaining = [entry for found in by_node.values() for entry in found]
        remaining += _list_unverified(state, {**unreached, **errors})
        phase, code = RunPhase.CANCELLED, int(ExitCode.CANCELLED)
        if state.is_over:
            phase, code = state.phase, state.exit_code or 0
        ended = controller_events.RunEnded(state=phase.value, exit_code=code, remaining=remaining)
        writer.append(ended, read_head_time())
    finally:
        writer.close()
    return load_state(run)


def _list_unverified(state: RunState, errors: Mapping[str, ClusterctlError]) -> list[RemainingProcess]:
    """For each node that did not answer, return its known remaining processes, or else an unknown process."""
    remaining: list[RemainingProcess] = []
    for node, error in errors.items():
        earlier = [entry for entry in state.remaining if entry["node"] == node]
        unknown = outcome.build_remaining_process(node, None, f"unknown, because the node does not answer: {error}")
        remaining += earlier or [unknown]
    return remaining


def _list_output_files(state: RunState, node: str) -> list[str]:
    entry = state.nodes.get(node) or state.retired.get(node)
    places = [(a, r) for a in range(state.attempt + 1) for r in (entry.ranks if entry else ())]
    return [name(a, r) for a, r in places for name in (run_files.format_output_path, run_files.format_index_path)]


def find_highest_epoch(run: str, sessions: Mapping[str, Session]) -> int:
    """Return the highest epoch of a run that any node knows; 0 if no node knows an epoch."""
    answers, _ = call_all(sessions, lambda node, session: STATUS.call(session, {"run": run, "node": node}))
    return max((int(answer["epoch"] or 0) for answer in answers.values()), default=0)
