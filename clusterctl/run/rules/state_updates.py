"""Applies the events of a run's journals to its state. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from typing_extensions import assert_never

from clusterctl.agent.protocol import events
from clusterctl.agent.protocol.record_types import RemainingProcess
from clusterctl.run.rules import controller_events as head
from clusterctl.run.rules.failure_causes import (
    Cause,
    analyse_exit,
    find_cause_in_output,
    find_swallowed_exception,
)
from clusterctl.run.rules.state import (
    AttemptTimes,
    EarlierAttempt,
    MutableNodes,
    MutableWorkers,
    NodeState,
    RunPhase,
    RunState,
    StallState,
    WorkerPhase,
    WorkerState,
    cause_from_json,
)


def apply_node_event(state: RunState, node: str, stamp: events.Stamp, event: events.Event) -> RunState:
    """Return the state after an event of a node's journal; the same state if the event was applied before.

    An event of an earlier attempt changes only the sequence number of the last applied event.
    """
    if node in state.retired:
        return _apply_retired(state, state.retired[node], stamp, event)
    current = state.nodes.get(node)
    if current is None or stamp.seq <= current.seq:
        return state
    current = replace(current, seq=stamp.seq)
    state = _with_node(state, current)
    if getattr(event, "attempt", state.attempt) != state.attempt:
        return state
    return _apply_current(state, current, stamp, event)


class StateBuilder:
    """Applies many events to a state, and copies the tables of the state only once.

    A run of thousands of ranks has tens of thousands of events. `apply_node_event` copies a table for each event.

    Attributes:
        state: The state after the applied events. Until `build`, each event changes the tables of this state.
    """

    def __init__(self, state: RunState) -> None:
        self.state = replace(state, nodes=MutableNodes(state.nodes), workers=MutableWorkers(state.workers))

    def add_node_event(self, node: str, stamp: events.Stamp, event: events.Event) -> None:
        """Apply an event of a node's journal."""
        self.state = apply_node_event(self.state, node, stamp, event)

    def add_controller_event(self, time: float, event: head.ControllerEvent) -> None:
        """Apply an event of the controller's journal, which may replace the tables."""
        before, self.state = self.state, apply_controller_event(self.state, time, event)
        if self.state.nodes is not before.nodes or self.state.workers is not before.workers:
            self.state = StateBuilder(self.state).state

    def build(self) -> RunState:
        """Return the state after all events. Its tables never change."""
        return replace(self.state, nodes=dict(self.state.nodes), workers=dict(self.state.workers))


def _apply_retired(state: RunState, node: NodeState, stamp: events.Stamp, event: events.Event) -> RunState:
    if stamp.seq <= node.seq:
        return state
    node = replace(node, seq=stamp.seq)
    if isinstance(event, events.Swept):
        node = replace(node, swept=True, remaining=_remaining(node, event))
    elif isinstance(event, events.Finished):
        node = replace(node, finished=True)
    return replace(state, retired={**state.retired, node.node: node})


def _remaining(node: NodeState, event: events.Swept) -> tuple[RemainingProcess, ...]:
    return tuple({**survivor, "node": node.node} for survivor in event.remaining)


def _apply_current(state: RunState, node: NodeState, stamp: events.Stamp, event: events.Event) -> RunState:
    match event:
        case events.Prepared():
            node = replace(node, prepared=True, boot=stamp.boot, python=event.python, image=event.image)
            return _with_node(state, node)
        case events.Started():
            return _started(state, node, event, stamp.mono)
        case events.Exited():
            return _exited(state, node, event)
        case events.GroupJoined():
            return _with_node(state, replace(node, group=(tuple(event.ranks), event.size)))
        case events.Stopping():
            return _with_node(state, replace(node, stop_reason=event.reason, grace_s=event.grace))
        case events.Swept():
            late = tuple(event.leftovers), tuple(event.past_grace)
            node = replace(node, swept=True, remaining=_remaining(node, event), leftovers=late[0], past_grace=late[1])
            return _with_node(state, node)
        case events.Finished():
            return _with_node(state, replace(node, finished=True))
        case events.Alarm() if event.code == events.GPU_MEMORY:
            where = f"GPU {event.gpu}: " if event.gpu is not None else ""
            return _with_node(state, replace(node, gpu_memory_held=f"{where}{event.message}"))
        case events.Alarm() if event.code == events.PORT_TAKEN:
            return _with_node(state, replace(node, port_conflict=event.message))
        case events.RunAdopted() | events.Alarm() | events.OutputDropped():
            return state
        case _:
            assert_never(event)


def _started(state: RunState, node: NodeState, event: events.Started, mono: float) -> RunState:
    worker = state.workers.get(event.rank)
    if worker is None or worker.phase is WorkerPhase.EXITED or worker.node != node.node:
        return state
    worker = replace(worker, phase=WorkerPhase.RUNNING, pid=event.pid, start_time=event.start_time, began_s=mono)
    state = _with_worker(state, worker)
    if state.phase is RunPhase.STARTING and not MutableWorkers.has_pending(state.workers):
        stalled = state.stall is not None and state.stall.phase == "confirmed"
        return replace(state, phase=RunPhase.STALLED if stalled else RunPhase.RUNNING)
    return state


def _exited(state: RunState, node: NodeState, event: events.Exited) -> RunState:
    worker = state.workers.get(event.rank)
    # A node may report only its own ranks.
    if worker is None or worker.node != node.node:
        return state
    worker = replace(
        worker,
        phase=WorkerPhase.EXITED,
        exit_code=event.exit_code,
        signal=event.signal,
        stopped=event.stopped,
        tail=event.tail,
        swallowed_exception=""
        if event.stopped or event.exit_code or event.error
        else find_swallowed_exception(event.tail),
        cause_before_stop=find_cause_in_output(event.rank, node.node, event.tail) if event.stopped else None,
        lasted_s=None if worker.began_s is None else max(0.0, event.latest - worker.began_s),
        has_failed_inside=event.exit_code == 0 and event.error is not None,
        exited=event,
        exit_analysis=None if event.stopped else analyse_exit(node.node, event, node.clock or (0.0, math.inf)),
    )
    return _with_worker(state, worker)


def apply_controller_event(state: RunState, time: float, event: head.ControllerEvent) -> RunState:
    """Return the state after an event of the controller's journal; `time` is the head's clock when it was written."""
    match event:
        case head.RunCreated():
            return replace(state, run=event.run, name=event.name, path=event.path, created=time)
        case head.LinkChanged():
            return _link(state, time, event)
        case head.ClockEstimated():
            return _clock(state, event)
        case head.TouchedNodes():
            return replace(state, touched_nodes=_joined(state.touched_nodes, event.nodes))
        case head.AttemptStarted():
            return _attempt(state, time, event)
        case head.AttemptEndDecided():
            return _decided(state, time, event)
        case head.RestartPlanned():
            return _restarting(state, time, event)
        case head.StallChanged() | head.IdleChanged():
            return _stall(state, time, event)
        case head.StartFailed():
            why, node = str(event.error.get("message", "")), event.error.get("node")
            cause = Cause(kind="start_failed", node=node, message=why, certain=True)
            return replace(state, error=event.error, external_cause=cause)
        case head.RunEnded():
            phase = RunPhase(event.state)
            # A later check of the remaining processes writes a second event, but the run ended at the first event.
            ended = state.ended if state.is_over else time
            return replace(state, phase=phase, exit_code=event.exit_code, ended=ended, remaining=tuple(event.remaining))
        case head.HealthChanged():
            return _health(state, event)
        case head.ResultsFetched():
            return replace(state, results=event)
        case head.StartStepProgress() | head.FirstStepSeen() | head.Note():
            return _update_times(state, time, event)
        case _:
            assert_never(event)


def _update_times(
    state: RunState, time: float, event: head.StartStepProgress | head.FirstStepSeen | head.Note
) -> RunState:
    times = state.times
    match event:
        case head.StartStepProgress(name=head.WAIT_STEP):
            phase = RunPhase.STARTING if event.ended else RunPhase.WAITING
            waits_for = tuple(f"{node}: {what}" for node, what in event.waiting)
            return replace(state, phase=phase, waits_for=waits_for, waited_until=time)
        case head.StartStepProgress(name="start", ended=True, failed=False):
            return replace(state, times=replace(times, started=time))
        case head.FirstStepSeen() if event.attempt == state.attempt:
            began = time - event.ago_s if times.first_step_at is None else times.first_step_at
            return replace(state, times=replace(times, first_step_at=began, first_step=event.step))
        case _:
            return state


def _decided(state: RunState, time: float, event: head.AttemptEndDecided) -> RunState:
    if event.attempt != state.attempt or state.reason is not None:
        return state
    stall = None if state.stall is None else state.stall.at_time(time)
    return replace(
        state,
        phase=RunPhase.STOPPING,
        reason=event.reason,
        reason_text=event.message,
        stall=stall,
        times=replace(state.times, decided=time),
    )


def _restarting(state: RunState, time: float, event: head.RestartPlanned) -> RunState:
    past = EarlierAttempt(
        number=state.attempt,
        began=state.running_since,
        ended=time,
        why=event.why,
        cause=cause_from_json(event.cause),
        step=event.step,
        resume_from=state.resume_from,
        times=replace(state.times, last_step=event.own_step),
    )
    return replace(
        state,
        phase=RunPhase.RESTARTING,
        restart_at=event.at,
        restart_why=event.why,
        next_nodes=tuple(event.nodes),
        failure_signatures=(*state.failure_signatures, (event.ended, event.newest_checkpoint)),
        earlier_attempts=(*state.earlier_attempts, past),
    )


def _clock(state: RunState, event: head.ClockEstimated) -> RunState:
    node = state.nodes.get(event.node)
    if node is None:
        return state
    return _with_node(state, replace(node, clock=(event.offset, event.error), clock_ahead_s=event.ahead))


def _link(state: RunState, time: float, event: head.LinkChanged) -> RunState:
    node = state.nodes.get(event.node)
    if node is None:
        return state
    swept = node.swept or event.rebooted
    silent = time - event.seconds if event.link == "unreachable" else None
    state = _with_node(state, replace(node, link=event.link, link_why=event.why, silent_since=silent, swept=swept))
    if event.link != "lost":
        return state
    if node.silent_since is not None:
        state = replace(state, times=_add_stall(state.times, node.silent_since))
    running = [r for r in node.ranks if state.workers[r].phase is not WorkerPhase.EXITED]
    unknown = [
        r for r in node.ranks if state.workers[r].phase is WorkerPhase.EXITED and state.workers[r].is_exit_unknown
    ]
    lost = {r: replace(state.workers[r], phase=WorkerPhase.LOST) for r in running}
    state = replace(state, workers={**state.workers, **lost})
    if state.external_cause is not None or not (running or unknown):
        return state
    message = f"node lost: {event.why or 'no answer'}"
    cause = Cause(kind="node_lost", node=event.node, rank=min(running or unknown), message=message, certain=True)
    return replace(state, external_cause=cause)


def _attempt(state: RunState, time: float, event: head.AttemptStarted) -> RunState:
    nodes: dict[str, NodeState] = {}
    workers: dict[int, WorkerState] = {}
    before = {**state.retired, **state.nodes}
    for entry in event.nodes:
        name, ranks = entry["node"], tuple(entry["ranks"])
        old = before.get(name)
        place = {key: entry[key] for key in ("address", "role", "is_service") if key in entry}
        fresh = NodeState(node=name, node_rank=entry["node_rank"], ranks=ranks, **place)
        if old is not None:
            fresh = replace(fresh, link=old.link, clock=old.clock, clock_ahead_s=old.clock_ahead_s, seq=old.seq)
        nodes[name] = fresh
        workers |= {r: WorkerState(rank=r, local_rank=i, node=name) for i, r in enumerate(ranks)}
    return replace(
        state,
        attempt=event.attempt,
        phase=RunPhase.STARTING,
        world_size=event.world_size,
        master_addr=event.master_addr,
        master_port=event.master_port,
        nodes=nodes,
        workers=workers,
        running_since=time,
        reason=None,
        reason_text="",
        external_cause=None,
        stall=None,
        last_stall=None,
        idle_since=None,
        troubles={key: event for key, event in state.troubles.items() if event.node in nodes},
        restart_at=None,
        restart_why="",
        next_nodes=(),
        retired={name: node for name, node in before.items() if name not in nodes},
        placements=(*state.placements, *((event.attempt, e["node"], tuple(e["ranks"])) for e in event.nodes)),
        touched_nodes=_joined(state.touched_nodes, nodes),
        newest_checkpoint=event.newest_checkpoint,
        resume_from=event.resume_from,
        results=None,
        times=AttemptTimes(resumed_from_at=event.resume_from_time),
        restarts=(*state.restarts, time) if event.attempt > 0 else state.restarts,
    )


def _joined(before: tuple[str, ...], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*before, *more]))


def _stall(state: RunState, time: float, event: head.StallChanged | head.IdleChanged) -> RunState:
    if event.attempt != state.attempt:
        return state
    if isinstance(event, head.IdleChanged):
        return replace(state, idle_since=time - event.idle_s if event.idle_s > 0 else None)
    if event.phase == "none":
        phase = RunPhase.RUNNING if state.phase is RunPhase.STALLED else state.phase
        stood = state.last_stall if state.stall is None else replace(state.stall, until=time)
        stalls = tuple((began, time if ended is None else ended) for began, ended in state.times.stalls)
        times = replace(state.times, stalls=stalls)
        return replace(state, stall=None, last_stall=stood, phase=phase, times=times)
    stall = StallState(
        phase=event.phase,
        since_s=event.since_s,
        limit_s=event.limit_s,
        reason=event.reason,
        at=time,
        evidence=event.evidence,
    )
    if state.phase in (RunPhase.RUNNING, RunPhase.STALLED):
        state = replace(state, phase=RunPhase.STALLED if event.phase == "confirmed" else RunPhase.RUNNING)
    return replace(state, stall=stall, times=_add_stall(state.times, time - event.since_s))


def _add_stall(times: AttemptTimes, began: float) -> AttemptTimes:
    """Return the times with a stall that lasts; the same times if a stall lasts already."""
    is_open = bool(times.stalls) and times.stalls[-1][1] is None
    return times if is_open else replace(times, stalls=(*times.stalls, (began, None)))


def _health(state: RunState, event: head.HealthChanged) -> RunState:
    key = (event.node, event.gpu, event.key)
    others = {k: v for k, v in state.troubles.items() if k != key}
    return replace(state, troubles=others if event.status == "PASS" else {**others, key: event})


def _with_node(state: RunState, node: NodeState) -> RunState:
    if isinstance(state.nodes, MutableNodes):
        state.nodes[node.node] = node
        return state
    return replace(state, nodes={**state.nodes, node.node: node})


def _with_worker(state: RunState, worker: WorkerState) -> RunState:
    if isinstance(state.workers, MutableWorkers):
        state.workers.put(worker)
        return state
    return replace(state, workers={**state.workers, worker.rank: worker})
