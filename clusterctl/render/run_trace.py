"""Shows a run as a trace: attempts, restarts, stalls, checkpoints, links of the nodes, ranks, steps and load. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from clusterctl.agent.protocol import events as node_events
from clusterctl.render.charts import TimelineEvent
from clusterctl.render.trace_events import TraceBuilder, TraceEvent
from clusterctl.run.record.sample_files import Curves
from clusterctl.run.record.state_reader import StampedNodeEvent, TimedControllerEvent
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunState


def build_run_trace(
    state: RunState,
    events: tuple[Sequence[TimedControllerEvent], Sequence[StampedNodeEvent]],
    timeline: Iterable[TimelineEvent],
    curves: Curves,
    now: float,
) -> list[TraceEvent]:
    """Return the trace events of a run. Times are on the head's wall clock.

    Args:
        state: The state after all events.
        events: The events of the controller, and those of all nodes.
        timeline: The messages of the run with their times.
        curves: The steps of the ranks, and the measurements of the nodes.
        now: The present time, at which the slices of a run that is not over end.
    """
    trace = TraceBuilder(state.created or now)
    end = state.ended or now
    for time, event in events[0]:
        _add_controller_event(trace, state.run, time, event)
    for label in sorted(timeline, key=lambda one: one.time):
        trace.add_instant(state.run, "messages", label.label, label.time)
    causes = {cause.rank: cause.message for cause in state.causes if cause.message}
    for node, stamp, node_event in events[1]:
        time = stamp.wall - state.clock_ahead_s(node)
        match node_event:
            case node_events.Started():
                trace.change_slice(
                    node, f"rank {node_event.rank}", time, f"attempt {node_event.attempt}", pid=node_event.pid
                )
            case node_events.Exited():
                code, signal = node_event.exit_code, node_event.signal
                trace.change_slice(node, f"rank {node_event.rank}", time, exit_code=code, signal=signal)
                if node_event.attempt == state.attempt and (message := causes.get(node_event.rank)):
                    trace.add_instant(node, f"rank {node_event.rank}", message, time)
            case _:
                pass
    trace.end_slices(end)
    nodes = {rank: node for _, node, ranks in state.placements for rank in ranks}
    for rank, points in curves.steps.items():
        for time, step in points:
            trace.add_counter(nodes.get(rank, state.run), f"step of rank {rank}", time, step)
    for what, by_node in curves.machines.items():
        for node, points in by_node.items():
            for time, value in points:
                trace.add_counter(node, what, time, value)
    return trace.events


def _add_controller_event(trace: TraceBuilder, run: str, time: float, event: controller_events.ControllerEvent) -> None:
    match event:
        case controller_events.AttemptStarted():
            trace.change_slice(run, "restarts", time)
            trace.change_slice(
                run, "attempts", time, f"attempt {event.attempt}", ranks=event.world_size, resume_from=event.resume_from
            )
            with contextlib.suppress(ValueError):  # there is no checkpoint
                path, written_at, _ = (event.newest_checkpoint or "").rsplit(" ", 2)
                trace.add_instant(run, "checkpoints", path, float(written_at))
        case controller_events.RestartPlanned():
            trace.change_slice(run, "attempts", time, end=event.ended)
            trace.change_slice(run, "stalls", time)
            trace.change_slice(run, "restarts", time, f"restart: {event.why}", attempt=event.attempt)
        case controller_events.StallChanged(phase="none"):
            trace.change_slice(run, "stalls", time)
        case controller_events.StallChanged():
            # The rule is sure of a stall some time after it began.
            began = time - event.since_s if event.phase == "suspected" else time
            trace.change_slice(run, "stalls", began, event.phase, reason=event.reason)
        case controller_events.LinkChanged():
            trace.change_slice(event.node, "link", time - event.seconds, event.link, why=event.why)
        case controller_events.RunEnded():
            trace.change_slice(run, "attempts", time, end=event.state)
        case controller_events.StartStepProgress(ended=True):
            trace.add_slice(run, "start", event.name, time - event.seconds, time, detail=event.detail)
        case _:
            pass
