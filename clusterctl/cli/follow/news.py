"""What the live view says when the controller has written something, and how that is told later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.protocol import events as node_events
from clusterctl.cli.lookup.stalled import where_ranks_are
from clusterctl.render import run_messages
from clusterctl.render.attempts import restart_news
from clusterctl.run.rules import controller_events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.render.console import Terminal
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


class News:
    """Puts events into words; a node that does not answer is told once, and so is what all nodes say alike.

    Args:
        run: The run.
        terminal: Where it is told.
    """

    def __init__(self, run: RunDir, terminal: Terminal) -> None:
        self._run, self._terminal = run, terminal
        self._unreachable: set[str] = set()
        self._forked: set[int] = set()

    def join(self, state: RunState) -> None:
        """Take note of what somebody who comes now is told of a run as it is."""
        self._unreachable = {node.node for node in state.nodes.values() if node.link == "unreachable"}

    def of(self, moment: float, event: controller_events.ControllerEvent, state: RunState) -> Sequence[str]:
        """Return what an event says to whoever follows the run; `moment` is when it was written."""
        match event:
            case controller_events.Note():
                return [f"{event.level}: {event.text}" if event.level != "info" else event.text]
            case controller_events.Link():
                return self._of_link(event)
            case controller_events.EndDecided():
                return [run_messages.decision_news(event, state)]
            case controller_events.Restarting():
                return restart_news(moment, event, self._terminal)
            case controller_events.Health():
                return [run_messages.health_news(event)]
            case controller_events.Results():
                return run_messages.results_news(event)
            case controller_events.StallChanged():
                first, *hints = run_messages.stall_news(event, self._run.run)
                where = where_ranks_are(self._run, state) if event.phase == "confirmed" else []
                return [first, *(f"  {line}" for line in where), *hints]
            case _:
                return []

    def of_node(self, node: str, stamp: node_events.Stamp, event: node_events.Event, state: RunState) -> Sequence[str]:
        """Return what an event of a node says to whoever follows the run."""
        lines = run_messages.node_news(node, stamp, event, state)
        if not isinstance(event, node_events.Alarm) or event.code != node_events.FORKED or len(state.nodes) == 1:
            return lines
        if event.attempt in self._forked:
            return []
        self._forked.add(event.attempt)
        return [f"{line} (the first of {len(state.nodes)} nodes)" for line in lines]

    def old(self, moment: float, event: controller_events.ControllerEvent, state: RunState) -> Sequence[str]:
        """Return what was told of an event, but for what is still so (`past.present`)."""
        match event:
            case controller_events.Health() if event in state.troubles.values():
                return []
            case controller_events.StallChanged():
                still = state.stall is not None and state.stall.at == moment
                return [] if still else run_messages.stall_news(event, self._run.run)[:1]
            case _:
                return self.of(moment, event, state)

    def _of_link(self, event: controller_events.Link) -> Sequence[str]:
        known = event.node in self._unreachable
        match event.link:
            case "unreachable":
                self._unreachable.add(event.node)
                return [] if known else [run_messages.unreachable_news(event)]
            case "connected" if known:
                self._unreachable.discard(event.node)
                return [f"{event.node}: connected again"]
            case "lost":
                self._unreachable.discard(event.node)
                return [f"{event.node}: lost ({event.why})"]
            case _:
                return []
