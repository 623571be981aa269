"""The end of a run on nodes that no controller follows: stop it, wait until it is swept, finish it."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Iterable, Mapping

from clusterctl.agent.protocol import command_types, requests
from clusterctl.agent.protocol import run_files as protocol_files
from clusterctl.agent.protocol.command_types import StatusAnswer
from clusterctl.agent.protocol.record_types import RemainingProcess
from clusterctl.agent.protocol.requests import StopReason
from clusterctl.errors import ClusterctlError, ExitCode, NotFoundError, RefusedError
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.run.record.clock import read_head_time
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import load_state
from clusterctl.run.record.writer import Writer
from clusterctl.run.rules import controller_events, outcome
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.session.requests import FINISH, READ, STATUS, STOP
from clusterctl.session.session import Session

_BEYOND_GRACE = 30.0
"""Seconds that a node may take for SIGKILL, the sweep and what the kernel needs, beyond the grace."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_PIECE = 1 << 20


def end_on_node(session: Session, run: str, node: str, grace: float) -> list[RemainingProcess]:
    """Stop everything of a run on one node and finish the run there; return what could not be ended.

    The session's epoch must be above every earlier one; whatever of the run reaches the node later is refused by it.

    Raises:
        ClusterctlError: The node did not answer, or not in time.
    """
    request: command_types.RunArguments = {"run": run, "node": node}
    stop = requests.Stop(run=run, node=node, grace=grace, reason=StopReason.CANCELLED.value)
    deadline = time.monotonic() + grace + _BEYOND_GRACE
    pause = _FIRST_PAUSE
    STOP.call(session, stop)
    status = STATUS.call(session, request)
    while not _is_ended(status) and time.monotonic() < deadline:
        # One whose files were removed takes its seat anew in a while; until then it has heard of no stop.
        if not status["supervisor"] or status["state"] == "new":
            STOP.call(session, stop)
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)
        status = STATUS.call(session, request)
    # Refused where something of the attempt has still not ended, which is then what remains.
    with contextlib.suppress(RefusedError):
        FINISH.call(session, {"run": run, "node": node, "state": "cancelled", "exit_code": int(ExitCode.CANCELLED)})
    return [{**one, "node": node} for one in status["remaining"]] or _unended(node, status)


def _unended(node: str, status: StatusAnswer) -> list[RemainingProcess]:
    """Return the workers of a node that did not come to an end in time; where it names none, that nobody knows."""
    if _is_ended(status):
        return []
    nobody = outcome.build_remaining_process(node, None, outcome.OVERDUE)
    return [
        {**nobody, "pid": worker["pid"], "start_time": worker["start_time"], "why": "not ended in time"}
        for worker in status["workers"]
        if worker["alive"]
    ] or [nobody]


def _is_ended(status: StatusAnswer) -> bool:
    """Return whether a node has done what it can; one that has lost its files only knows what still runs there."""
    if status["state"] == "new":
        return not status["remaining"]
    return status["state"] in ("prepared", "swept", "finished")


def fetch_output(session: Session, writer: Writer, run: str, node: str, files: Iterable[str]) -> None:
    """Bring the replicas of a node's files up to what the node has, where nobody follows it any more.

    Raises:
        ClusterctlError: The node did not answer.
        OSError: The head has no space for it.
    """
    cursors = writer.list_cursors(node)
    for file in files:
        offset = cursors.get(file, 0)
        with contextlib.suppress(NotFoundError):
            while True:
                request: command_types.ReadArguments = {
                    "run": run,
                    "node": node,
                    "file": file,
                    "offset": offset,
                    "length": _PIECE,
                }
                answer = READ.call(session, request)
                data = base64.b64decode(answer["data"])
                if not data:
                    break
                offset = writer.replicate(node, file, int(answer["offset"]), data)


def end_without_controller(
    run: RunDir,
    state: RunState,
    sessions: Mapping[str, Session],
    unreached: Mapping[str, ClusterctlError],
    grace: float,
) -> RunState:
    """End what there is of a run on its nodes; fetch their output; return the new state.

    A run that was over keeps its end; any other is cancelled.

    Args:
        run: The run.
        state: What is known of it.
        sessions: The nodes on which something may be left, as far as they answer.
        unreached: Those that do not, and why.
        grace: Seconds from SIGTERM to SIGKILL.

    Raises:
        RefusedError: A controller is at work on the run.
    """
    writer = Writer(run)
    try:
        epoch = writer.next_epoch(find_highest_epoch(run.run, sessions))

        def end(node: str, session: Session) -> list[RemainingProcess]:
            session.epoch = epoch
            left = end_on_node(session, run.run, node, grace)
            # What was ended is ended, whatever becomes of the output; the node still has it.
            with contextlib.suppress(ClusterctlError, OSError):
                fetch_output(session, writer, run.run, node, _list_output_files(state, node))
            return left

        left, errors = call_all(sessions, end)
        remaining = [entry for found in left.values() for entry in found]
        remaining += _list_unverified(state, {**unreached, **errors})
        writer.append(_build_end(state, remaining), read_head_time())
    finally:
        writer.close()
    return load_state(run)


def _build_end(state: RunState, remaining: list[RemainingProcess]) -> controller_events.Ended:
    if state.over:
        return controller_events.Ended(state=state.phase.value, exit_code=state.exit_code or 0, remaining=remaining)
    return controller_events.Ended(
        state=RunPhase.CANCELLED.value, exit_code=int(ExitCode.CANCELLED), remaining=remaining
    )


def _list_unverified(state: RunState, errors: Mapping[str, ClusterctlError]) -> list[RemainingProcess]:
    """Return what may be left on nodes that did not answer: what was known to be, or that nobody knows."""
    remaining: list[RemainingProcess] = []
    for node, error in errors.items():
        earlier = [entry for entry in state.remaining if entry["node"] == node]
        unknown = outcome.build_remaining_process(node, None, f"nobody knows what is there: {error}")
        remaining += earlier or [unknown]
    return remaining


def _list_output_files(state: RunState, node: str) -> list[str]:
    entry = state.nodes.get(node) or state.retired.get(node)
    ranks = () if entry is None else entry.ranks
    return [
        f(a, r)
        for a in range(state.attempt + 1)
        for r in ranks
        for f in (protocol_files.format_output_path, protocol_files.format_index_path)
    ]


def _read_epoch(run: str, node: str, session: Session) -> int:
    told = STATUS.call(session, {"run": run, "node": node})
    return int(told["epoch"] or 0)


def find_highest_epoch(run: str, sessions: Mapping[str, Session]) -> int:
    """Return the highest epoch that any of the nodes knows of a run, by the node names that are the keys; 0 if none."""
    seen: dict[str, int]
    seen, _ = call_all(dict(sessions), lambda n, s: _read_epoch(run, n, s))
    return max(seen.values(), default=0)
