"""What a run that is over has come to: its state, its exit code, and its cause. Pure.

What may still be there of a run that nobody waits for any more: what could not be ended, what nobody knows. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.protocol.requests import StopReason
from clusterctl.errors import ExitCode
from clusterctl.run.rules.blame import Cause
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, WorkerPhase, WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.agent.protocol.record_types import RemainingProcess


def determine_outcome(state: RunState) -> tuple[RunPhase, ExitCode]:
    """Return how an attempt that is over ended, as the state of its run and its exit code."""
    match state.reason:
        case StopReason.CANCELLED.value:
            return RunPhase.CANCELLED, ExitCode.CANCELLED
        case StopReason.STALLED.value:
            return RunPhase.FAILED, ExitCode.STALLED
        case StopReason.TIME_LIMIT.value:
            return RunPhase.FAILED, ExitCode.TIME_LIMIT
        case StopReason.NODE_LOST.value:
            return RunPhase.LOST, ExitCode.LOST
        case StopReason.UNHEALTHY.value:
            return RunPhase.FAILED, ExitCode.UNHEALTHY
        case _:
            pass
    if any(n.link == "lost" for n in state.nodes.values()):
        return RunPhase.LOST, ExitCode.LOST
    if state.cause is not None and state.cause.kind == "unknown":
        return RunPhase.LOST, ExitCode.LOST
    done = all(w.ended_well for w in state.workers.values()) and not state.has_left_work
    return (RunPhase.SUCCEEDED, ExitCode.OK) if done else (RunPhase.FAILED, ExitCode.FAILED)


_RULE_REASONS = (
    StopReason.STALLED.value,
    StopReason.TIME_LIMIT.value,
    StopReason.UNHEALTHY.value,
    StopReason.FENCE.value,
)


def find_final_cause(state: RunState) -> Cause | None:
    """Return what ended a run: the first observed failure, or the rule that ended it where no rank had failed.

    Where somebody else had taken a port, the ranks can only say that theirs was in use.
    """
    by_rule = state.cause is None and state.reason in _RULE_REASONS
    if state.reason is not None and (by_rule or state.reason == StopReason.PORT_TAKEN.value):
        return Cause(kind=state.reason, message=state.reason_text, certain=True)
    return state.cause


NODE_LOST = "node lost"
OVERDUE = "its node does not say that it has ended"


def list_remaining_processes(state: RunState, overdue: Sequence[NodeState] = ()) -> tuple[RemainingProcess, ...]:
    """Return what may still be there of a run: what could not be ended, and what nobody can know of.

    Args:
        state: The run, all of whose attempts have ended as far as can be known.
        overdue: Nodes that answer and do not say that all has ended.
    """
    processes: list[RemainingProcess] = []
    # Another attempt is announced once the workers of lost nodes have timed out (`policy`), and not before.
    fenced = state.phase is RunPhase.RESTARTING
    for node in (*state.retired.values(), *state.nodes.values()):
        processes += node.remaining
        if node in overdue:
            processes += _list_unconfirmed(state, node, WorkerPhase.RUNNING, OVERDUE) or [
                build_remaining_process(node.node, None, OVERDUE)
            ]
        elif node.node not in state.retired and node.link == "lost" and not (node.swept or fenced):
            processes += _list_unconfirmed(state, node, WorkerPhase.LOST, NODE_LOST) or [
                build_remaining_process(node.node, None, NODE_LOST)
            ]
    return tuple(processes)


def changes_exit_code(state: RunState) -> bool:
    """Return whether something of an ended run may still run, and its own exit code does not say so: exit code 7."""
    lost = state.phase is RunPhase.LOST
    return any(not lost or item.get("why") != NODE_LOST for item in state.remaining)


def _list_unconfirmed(state: RunState, node: NodeState, phase: WorkerPhase, why: str) -> list[RemainingProcess]:
    """Return the workers of a node in that phase, of which nobody knows whether they are still there."""
    workers = [state.workers[rank] for rank in node.ranks]
    return [build_remaining_process(node.node, w, why) for w in workers if w.phase is phase and w.pid is not None]


def build_remaining_process(node: str, worker: WorkerState | None, why: str) -> RemainingProcess:
    """Return one item of `RunState.remaining`; `None` where no process is known."""
    pid, start_time = (None, None) if worker is None else (worker.pid, worker.start_time)
    return {"node": node, "pid": pid, "start_time": start_time, "command": None, "why": why}
