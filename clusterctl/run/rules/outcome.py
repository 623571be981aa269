"""What a run that is over has come to: its state, its exit code, and its cause. Pure."""

from __future__ import annotations

from clusterctl.agent.protocol.requests import StopReason
from clusterctl.errors import ExitCode
from clusterctl.run.rules.blame import Cause
from clusterctl.run.rules.state import RunPhase, RunState


def outcome(state: RunState) -> tuple[RunPhase, ExitCode]:
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


_ENDED_BY_RULE = (
    StopReason.STALLED.value,
    StopReason.TIME_LIMIT.value,
    StopReason.UNHEALTHY.value,
    StopReason.FENCE.value,
)


def final_cause(state: RunState) -> Cause | None:
    """Return what ended a run: the first observed failure, or the rule that ended it where no rank had failed.

    Where somebody else had taken a port, the ranks can only say that theirs was in use.
    """
    by_rule = state.cause is None and state.reason in _ENDED_BY_RULE
    if state.reason is not None and (by_rule or state.reason == StopReason.PORT_TAKEN.value):
        return Cause(kind=state.reason, message=state.reason_text, certain=True)
    return state.cause
