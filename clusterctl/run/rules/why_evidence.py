"""A run and the evidence of its ranks, as what `why` judges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.run.rules import rank_stacks
from clusterctl.run.rules.blame import find_cause_in_output
from clusterctl.run.rules.end_warnings import list_end_warnings
from clusterctl.run.rules.state import NodePhase, WorkerPhase
from clusterctl.why.evidence import (
    Evidence,
    Node,
    Rank,
    RankExit,
    RankSnapshot,
    RunError,
    StartRefusal,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from clusterctl.agent.protocol.record_types import FlightRecorderEntry, RankEvidence
    from clusterctl.run.rules.blame import Cause
    from clusterctl.run.rules.state import NodeState, RunState, WorkerState

LEFT_WORK_HINT = "keep the work in the foreground, or end the script with `wait PID`"
_RUN_ERROR_KINDS = ("node_lost", "start_failed", "unhealthy", "port_taken", "time_limit")


def build_why_evidence(
    state: RunState,
    evidence: Mapping[str, RankEvidence],
    *,
    seen_at: str | None = None,
    folder: str | None = None,
    stalled: bool = False,
    outputs: Mapping[int, str] | None = None,
    collective_counts: Mapping[int, Mapping[str, tuple[int, int]]] | None = None,
) -> Evidence:
    """Return what is known of the newest attempt of a run.

    Args:
        state: What the journals tell.
        evidence: What was seen of ranks, by rank (`agent.watch.evidence`), before they ended.
        seen_at: Where that lies.
        folder: The run's own.
        stalled: Take what was seen as that of a stall, whether or not the rule says so now.
        outputs: The ends of what ranks wrote before they were stopped.
        collective_counts: What ranks had begun and ended before the first of them ended.
    """
    collective_counts, outputs = collective_counts or {}, outputs or {}
    snapshots = {
        stack.rank: _rank_snapshot(stack, evidence[str(stack.rank)])
        for stack in rank_stacks.parse_rank_stacks(evidence)
    }
    return Evidence(
        run=state.run,
        over=state.over,
        reason=state.reason,
        ranks=tuple(
            _rank(worker, snapshots.get(rank), outputs.get(rank, ""), collective_counts.get(rank))
            for rank, worker in sorted(state.workers.items())
        ),
        nodes={name: _node(node) for name, node in state.nodes.items()},
        stalled=stalled or (state.stall is not None and state.stall.phase == "confirmed"),
        limit=None if state.stall is None else state.stall.limit_s,
        other=_run_error(state),
        troubles=_troubles(state),
        seen_at=seen_at if snapshots else None,
        folder=folder,
        warnings=tuple(list_end_warnings(state)),
    )


def _rank(
    worker: WorkerState,
    snapshot: RankSnapshot | None,
    output: str,
    collective_counts: Mapping[str, tuple[int, int]] | None,
) -> Rank:
    started = worker.phase not in (WorkerPhase.PENDING, WorkerPhase.STARTING)
    end = _rank_exit(worker, output) if worker.phase is WorkerPhase.EXITED else None
    return Rank(
        rank=worker.rank,
        node=worker.node,
        started=started,
        end=end,
        look=snapshot,
        counted=collective_counts,
    )


def _rank_exit(worker: WorkerState, output: str) -> RankExit:
    analysis = worker.exit_analysis
    cause = analysis.cause if analysis is not None else None
    if worker.stopped and output:
        cause = find_cause_in_output(worker.rank, worker.node, output)
    return RankExit(
        exit_code=cause.exit_code if cause is not None else worker.exit_code,
        signal=cause.signal if cause is not None else None,
        earliest=analysis.earliest if analysis is not None else 0.0,
        latest=analysis.latest if analysis is not None else 0.0,
        on_node_clock=analysis.on_node_clock if analysis is not None else None,
        oom=worker.oom,
        message=worker.swallowed or (cause.message if cause is not None else ""),
        traceback=cause.traceback if cause is not None else None,
        tail=worker.tail or output,
        secondary=cause is not None and cause.secondary,
        cls=cause.cls if cause is not None else None,
        is_recognised=cause is not None and cause.is_recognised,
        stopped=worker.stopped,
        failed_inside=worker.has_failed_inside,
    )


def _node(node: NodeState) -> Node:
    return Node(
        node=node.node,
        link=node.link or NodePhase.WAITING.value,
        why=node.link_why,
        addresses=(node.address,) if node.address else (),
    )


def _run_error(state: RunState) -> RunError | None:
    cause: Cause | None = state.external_cause
    if state.error is not None and not state.workers:
        error = state.error
        return RunError(
            kind="refused",
            message=str(error.get("message") or "the start was refused"),
            node=error.get("node"),
            hint=str(error.get("hint") or ""),
            reasons=tuple(_start_refusals(error)),
        )
    if cause is not None and cause.kind in _RUN_ERROR_KINDS:
        return RunError(kind=cause.kind, message=cause.message, node=cause.node)
    if state.has_left_work and state.cause is not None:
        message = f"all ranks ended with 0 within seconds, and {state.cause.message}"
        return RunError(kind="left_work", message=message, node=state.cause.node, hint=LEFT_WORK_HINT)
    return RunError(kind="cancelled", message="a person ended it") if state.reason == "cancelled" else None


def _start_refusals(error: Mapping[str, Any]) -> Iterator[StartRefusal]:
    """Yield what an error that ended a start names (see `start_failure`)."""
    for entry in (*(error.get("findings") or ()), *(error.get("nodes") or ())):
        node = entry.get("node")
        message = str(entry.get("message") or "").removeprefix(f"{node}: ")
        yield StartRefusal(
            node=node, message=message, check=str(entry.get("check") or ""), hint=str(entry.get("hint") or "")
        )


def _troubles(state: RunState) -> dict[str, tuple[str, ...]]:
    messages: dict[str, tuple[str, ...]] = {}
    for (node, _, _), trouble in state.troubles.items():
        messages[node] = (*messages.get(node, ()), trouble.message)
    return messages


def _rank_snapshot(stack: rank_stacks.RankStack, evidence: RankEvidence) -> RankSnapshot:
    inside = evidence.get("inside")
    seq = (inside.get("seq") or {}) if inside else {}
    return RankSnapshot(
        source=stack.source,
        state=stack.state,
        wchan=stack.wchan,
        cpu=evidence.get("cpu"),
        frames=stack.frames,
        children=tuple(evidence["children"]),
        step=inside.get("step") if inside else None,
        status_age=inside.get("age_s") if inside and not inside.get("unseen") else None,
        seq={group: (numbers[0], numbers[1]) for group, numbers in seq.items()},
        entries=_entries(evidence, seq),
        sockets=tuple(evidence.get("sockets") or ()),
        error=evidence.get("error"),
    )


def _entries(evidence: RankEvidence, seq: Mapping[str, Any]) -> tuple[FlightRecorderEntry, ...] | None:
    """Return what the shim wrote of the recorder, where it is of this standstill and not of an earlier one.

    It is written after some seconds without a collective: a rank that was stopped sooner still has what it wrote in a
    pause long before, and its counters have gone on since.
    """
    recorded = evidence.get("recorded")
    if recorded is None:
        return None
    newest: dict[str, int] = {}
    for entry in recorded:
        if not entry["p2p"]:
            newest[entry["group"]] = max(entry["number"], newest.get(entry["group"], 0))
    if any(group in seq and 0 < number < seq[group][0] for group, number in newest.items()):
        return None
    return tuple(recorded)
