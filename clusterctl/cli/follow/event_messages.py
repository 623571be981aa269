"""Formats messages about a followed run: about events of the controller, events of nodes, and stragglers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import events as node_events
from clusterctl.cli.status_views import describe_stalled_ranks, load_blocking_ranks
from clusterctl.render import run_messages
from clusterctl.render.attempt_table import describe_restart
from clusterctl.render.status_report import describe_slow_ranks
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import read_latest_activity
from clusterctl.run.rules import controller_events, rank_timing
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.why.slowness import LONG_WAIT_S

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal


class EventFormatter:
    """Formats events. Reports an unreachable node once, and a warning about forked processes once for all nodes.

    Args:
        run: The run.
        terminal: The terminal for the messages.
    """

    def __init__(self, run: RunDir, terminal: Terminal) -> None:
        self._run, self._terminal = run, terminal
        self._unreachable: set[str] = set()
        self._attempts_with_fork_warning: set[int] = set()

    def mark_unreachable_as_reported(self, state: RunState) -> None:
        """Record that `event_backlog.list_current_problems` has already reported the unreachable nodes."""
        self._unreachable = {node.node for node in state.nodes.values() if node.link == "unreachable"}

    def format_controller_event(
        self, moment: float, event: controller_events.ControllerEvent, state: RunState
    ) -> Sequence[str]:
        """Return the messages about a controller event at the time `moment`; most events have no message."""
        match event:
            case controller_events.Note():
                return [f"{event.level}: {event.text}" if event.level != "info" else event.text]
            case controller_events.LinkChanged():
                return self._format_link(event)
            case controller_events.AttemptEndDecided():
                return [run_messages.format_decision(event, state)]
            case controller_events.RestartPlanned():
                return describe_restart(moment, event, self._terminal)
            case controller_events.HealthChanged():
                return [run_messages.health_message(event)]
            case controller_events.IdleChanged(idle_s=0.0):
                return ["a GPU of the run works again"]
            case controller_events.IdleChanged():
                return [f"warn: {run_messages.idle_line(moment - event.idle_s, moment)}"]
            case controller_events.ResultsFetched():
                return run_messages.result_messages(event)
            case controller_events.StallChanged():
                first, *hints = run_messages.stall_messages(event, self._run.run)
                where = describe_stalled_ranks(self._run, state) if event.phase == "confirmed" else []
                return [first, *(f"  {line}" for line in where), *hints]
            case _:
                return []

    def format_node_event(
        self, node: str, stamp: node_events.Stamp, event: node_events.Event, state: RunState
    ) -> Sequence[str]:
        """Return the messages about a node's event; most events have no message."""
        lines = run_messages.node_event_messages(node, stamp, event, state)
        if not isinstance(event, node_events.Alarm) or event.code != node_events.FORKED or len(state.nodes) == 1:
            return lines
        if event.attempt in self._attempts_with_fork_warning:
            return []
        self._attempts_with_fork_warning.add(event.attempt)
        return [f"{line} (the first of {len(state.nodes)} nodes)" for line in lines]

    def format_past_event(
        self, moment: float, event: controller_events.ControllerEvent, state: RunState
    ) -> Sequence[str]:
        """Return the messages about an old event. Omit problems that `event_backlog.list_current_problems` reports."""
        match event:
            case controller_events.HealthChanged() if event in state.troubles.values():
                return []
            case controller_events.StallChanged():
                still = state.stall is not None and state.stall.at == moment
                return [] if still else run_messages.stall_messages(event, self._run.run)[:1]
            case _:
                return self.format_controller_event(moment, event, state)

    def _format_link(self, event: controller_events.LinkChanged) -> Sequence[str]:
        known = event.node in self._unreachable
        match event.link:
            case "unreachable":
                self._unreachable.add(event.node)
                return [] if known else [run_messages.unreachable_message(event)]
            case "connected" if known:
                self._unreachable.discard(event.node)
                return [f"{event.node}: connected again"]
            case "lost":
                self._unreachable.discard(event.node)
                return [f"{event.node}: lost ({event.why})"]
            case _:
                return []


_CHECK_INTERVAL_S = 10.0


class StragglerMonitor:
    """Reports the stragglers of a run that is not stalled. Each set of ranks is reported once per attempt.

    Every 10 s the monitor reads the samples of one node. Only if this node makes no progress, the monitor reads the
    samples of the other nodes.

    Args:
        run: The run.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._checked_at = float("-inf")
        self._reported: set[tuple[int, frozenset[int]]] = set()

    def describe_new_stragglers(self, state: RunState, now: float) -> list[str]:
        """Return the message about new stragglers, or an empty list; `now` is in monotonic seconds."""
        if now - self._checked_at < _CHECK_INTERVAL_S or state.phase is not RunPhase.RUNNING:
            return []
        self._checked_at = now
        slow = self._find_stragglers(state)
        key = (state.attempt, frozenset(slow))
        if not slow or key in self._reported:
            return []
        self._reported.add(key)
        return [*describe_slow_ranks(state, slow), f"hint: `clusterctl stacks {state.run}` shows where every rank is"]

    def _find_stragglers(self, state: RunState) -> dict[int, str]:
        first = state.workers.get(0)
        sample = None if first is None else read_latest_activity(self._run, first.node)
        if sample is None:
            return {}
        counted = any(rank_timing.get_collective_numbers(rank) for rank in (sample.get("ranks") or {}).values())
        still = counted and not rank_timing.has_recent_progress([sample], state.attempt, LONG_WAIT_S)
        return load_blocking_ranks(self._run, state) if still else {}
