"""What may still be there of a run that nobody waits for any more: what could not be ended, what nobody knows. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.run.rules.state import NodeState, RunPhase, RunState, WorkerPhase, WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.agent.protocol.process_types import RemainingProcess

NODE_LOST = "node lost"
OVERDUE = "its node does not say that it has ended"


def remaining(state: RunState, overdue: Sequence[NodeState] = ()) -> tuple[RemainingProcess, ...]:
    """Return what may still be there of a run: what could not be ended, and what nobody can know of.

    Args:
        state: The run, all of whose attempts have ended as far as can be known.
        overdue: Nodes that answer and do not say that all has ended.
    """
    left: list[RemainingProcess] = []
    # Another attempt is announced once the workers of lost nodes have timed out (`policy`), and not before.
    fenced = state.phase is RunPhase.RESTARTING
    for node in (*state.retired.values(), *state.nodes.values()):
        left += node.remaining
        if node in overdue:
            left += _unsure(state, node, WorkerPhase.RUNNING, OVERDUE) or [entry(node.node, None, OVERDUE)]
        elif node.node not in state.retired and node.link == "lost" and not (node.swept or fenced):
            left += _unsure(state, node, WorkerPhase.LOST, NODE_LOST) or [entry(node.node, None, NODE_LOST)]
    return tuple(left)


def changes_exit_code(state: RunState) -> bool:
    """Return whether something of an ended run may still run, and its own exit code does not say so: exit code 7."""
    lost = state.phase is RunPhase.LOST
    return any(not lost or item.get("why") != NODE_LOST for item in state.remaining)


def _unsure(state: RunState, node: NodeState, phase: WorkerPhase, why: str) -> list[RemainingProcess]:
    """Return the workers of a node in that phase, of which nobody knows whether they are still there."""
    workers = [state.workers[rank] for rank in node.ranks]
    return [entry(node.node, w, why) for w in workers if w.phase is phase and w.pid is not None]


def entry(node: str, worker: WorkerState | None, why: str) -> RemainingProcess:
    """Return one item of `RunState.remaining`; `None` where no process is known."""
    pid, start_time = (None, None) if worker is None else (worker.pid, worker.start_time)
    return {"node": node, "pid": pid, "start_time": start_time, "command": None, "why": why}
