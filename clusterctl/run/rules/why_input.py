"""Builds the input of `why` from the state of a run and the evidence of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clusterctl.agent.protocol.record_types import FlightRecorderEntry, RankEvidence
from clusterctl.run.rules.failure_causes import Cause, ExitAnalysis, find_cause_in_output
from clusterctl.run.rules.outcome import find_final_cause, list_end_warnings
from clusterctl.run.rules.stack_dump_parser import RankStack, parse_rank_stacks
from clusterctl.run.rules.state import NodePhase, NodeState, RunState, WorkerPhase, WorkerState
from clusterctl.why.evidence_types import (
    Evidence,
    Node,
    Rank,
    RankExit,
    RankSnapshot,
    RunError,
    StartRefusal,
    read_blindness,
)

LEFT_WORK_HINT = "keep the work in the foreground, or end the script with `wait PID`"
_RUN_ERROR_KINDS = ("node_lost", "start_failed", "unhealthy", "port_taken", "time_limit", "idle")


def build_why_evidence(
    state: RunState,
    evidence: Mapping[str, RankEvidence],
    *,
    evidence_folder: str | None = None,
    folder: str | None = None,
    stalled: bool = False,
    outputs: Mapping[int, str] | None = None,
    collective_counts: Mapping[int, Mapping[str, tuple[int, int]]] | None = None,
) -> Evidence:
    """Return the evidence about the newest attempt of a run.

    Args:
        state: The state that the journals give.
        evidence: The evidence of each rank that was collected before the rank ended.
        evidence_folder: The folder with the saved evidence.
        folder: The folder of the run.
        stalled: Whether the evidence was collected in a stall. The stall may be over now.
        outputs: The last output of each stopped rank.
        collective_counts: The collective numbers of each rank before the first exit.
    """
    collective_counts, outputs = collective_counts or {}, outputs or {}
    # torch counts the ranks of a role from 0.
    firsts = state.first_ranks
    first = {rank: firsts[state.nodes[worker.node].role] for rank, worker in state.workers.items()}
    snapshots = {
        stack.rank: _rank_snapshot(stack, evidence[str(stack.rank)], first.get(stack.rank, 0))
        for stack in parse_rank_stacks(evidence)
    }
    return Evidence(
        run=state.run,
        has_ended=state.is_over,
        reason=state.reason,
        ranks=tuple(
            _rank(
                worker,
                state.nodes[worker.node],
                snapshots.get(rank),
                outputs.get(rank, ""),
                collective_counts.get(rank),
            )
            for rank, worker in sorted(state.workers.items())
        ),
        nodes={
            node.node: Node(
                node=node.node,
                link=node.link or NodePhase.WAITING.value,
                why=node.link_why,
                addresses=(node.address,) if node.address else (),
            )
            for node in state.nodes.values()
        },
        stalled=stalled or (state.stall is not None and state.stall.phase == "confirmed"),
        stall_limit_s=None if state.stall is None else state.stall.limit_s,
        run_error=_run_error(state),
        health_problems=_troubles(state),
        evidence_folder=evidence_folder if snapshots else None,
        run_folder=folder,
        warnings=tuple(list_end_warnings(state)),
    )


def _rank(
    worker: WorkerState,
    node: NodeState,
    snapshot: RankSnapshot | None,
    output: str,
    collective_counts: Mapping[str, tuple[int, int]] | None,
) -> Rank:
    return Rank(
        rank=worker.rank,
        node=worker.node,
        role=node.role,
        is_service=node.is_service,
        started=worker.phase not in (WorkerPhase.PENDING, WorkerPhase.STARTING),
        end=_rank_exit(worker, output) if worker.phase is WorkerPhase.EXITED else None,
        snapshot=snapshot,
        collective_counts=collective_counts,
    )


def _rank_exit(worker: WorkerState, output: str) -> RankExit:
    unknown = Cause(kind="unknown", exit_code=worker.exit_code)
    analysis = worker.exit_analysis or ExitAnalysis(cause=unknown, earliest=0.0, latest=0.0)
    cause = analysis.cause
    if worker.stopped and output:
        cause = find_cause_in_output(worker.rank, worker.node, output) or unknown
    return RankExit(
        exit_code=cause.exit_code,
        signal=cause.signal,
        earliest=analysis.earliest,
        latest=analysis.latest,
        on_node_clock=analysis.on_node_clock,
        oom=None if worker.exited is None else worker.exited.oom,
        message=worker.swallowed_exception or cause.message,
        traceback=cause.traceback,
        tail=worker.tail or output,
        secondary=cause.secondary,
        cls=cause.cls,
        is_recognised=cause.is_recognised,
        stopped=worker.stopped,
        failed_inside=worker.has_failed_inside,
    )


def _run_error(state: RunState) -> RunError | None:
    cause = state.external_cause or find_final_cause(state)
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
    """Yield the reasons in the error of a failed start (see `controller_events.StartFailed`)."""
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


def _rank_snapshot(stack: RankStack, evidence: RankEvidence, first_rank: int) -> RankSnapshot:
    inside, setup = evidence.get("inside"), evidence.get("setup")
    seq = (inside.get("seq") or {}) if inside else {}
    calls = evidence.get("calls")
    return RankSnapshot(
        source=stack.source,
        state=stack.state,
        wchan=stack.wchan,
        cpu=evidence.get("cpu"),
        frames=stack.main_thread_frames,
        children=tuple(evidence["children"]),
        step=inside.get("step") if inside else None,
        status_age=inside.get("age_s") if inside and not inside.get("unseen") else None,
        main_age=inside.get("main_age_s") if inside else None,
        seq={group: (numbers[0], numbers[1]) for group, numbers in seq.items()},
        entries=_entries(evidence, first_rank),
        setup=None if setup is None else {**setup, "rank": setup["rank"] + first_rank},
        call_values=calls["values"] if calls else {},
        awaited_keys=tuple(calls["awaited_keys"]) if calls else (),
        set_keys=tuple(calls["set_keys"]) if calls else (),
        sockets=tuple(evidence.get("sockets") or ()),
        pid=evidence["pid"],
        lock_holder=evidence.get("lock_holder"),
        tail=tuple(evidence.get("tail") or ()),
        blindness=read_blindness(inside),
        error=evidence.get("error"),
    )


def _entries(evidence: RankEvidence, first_rank: int) -> tuple[FlightRecorderEntry, ...] | None:
    """Return the entries of the flight recorder; `None` if the shim has written none since the last collective."""
    recorded = evidence.get("recorded")
    if recorded is None:
        return None
    peers = [entry["peer"] for entry in recorded]
    return tuple(
        entry if peer is None else {**entry, "peer": peer + first_rank}
        for entry, peer in zip(recorded, peers, strict=True)
    )
