"""What happened in a run, dated, as the live view told it: for a page that is read afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.cli.follow.news import News
from clusterctl.formatting import plural
from clusterctl.render import run_messages
from clusterctl.render.charts import TimelineEvent
from clusterctl.run.record.state_reader import StateReader
from clusterctl.run.rules import controller_events

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.record.state_reader import ControllerNews, NodeNews
    from clusterctl.run.rules.state import RunState

_BAD = (controller_events.StartFailed, controller_events.StallChanged, controller_events.EndDecided)
_WORN = ("warn:", "warning:", "unhealthy:", "lost")


def happened(run: RunDir, terminal: Terminal) -> tuple[RunState, list[TimelineEvent]]:
    """Return the state of a run, and what happened in it, in the order of time."""
    reader, news, found = StateReader(run), News(run, terminal), list[TimelineEvent]()

    def of_head(heard: ControllerNews) -> None:
        moment, event = heard
        match event:
            case controller_events.Attempt():
                size = f"{plural(event.world_size, 'rank')} on {plural(len(event.nodes), 'node')}"
                goes_on = f", from {event.resume_from}" if event.resume_from else ""
                found.append(
                    TimelineEvent(time=moment, label=f"attempt {event.attempt} begins: {size}{goes_on}", tone="dim")
                )
            case controller_events.Ended():
                tone = "good" if event.state == "succeeded" else "bad"
                found.append(
                    TimelineEvent(time=moment, label=f"{event.state} (exit code {event.exit_code})", tone=tone)
                )
            case _:
                lines = news.old(moment, event, reader.state)
                tone = "bad" if isinstance(event, _BAD) else "warn" if str(lines[:1]).startswith(_WORN, 2) else "dim"
                found.extend(TimelineEvent(time=moment, label=line, tone=tone) for line in lines[:1])

    def of_node(heard: NodeNews) -> None:
        node, stamp, event = heard
        if isinstance(event, run_messages.SILENT):
            return
        lines = news.of_node(node, stamp, event, reader.state)
        moment = stamp.wall - reader.state.ahead(node)
        found.extend(TimelineEvent(time=moment, label=line, tone="warn") for line in lines[:1])

    reader.apply_new_events(of_head, of_node)
    return reader.state, sorted(found, key=lambda tick: tick.time)
