"""`clusterctl report`."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import click

from clusterctl.agent.protocol.run_files import format_output_path
from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.follow.event_messages import EventFormatter
from clusterctl.cli.option_values import write_output
from clusterctl.cli.run_problems import load_findings, render_failure
from clusterctl.cli.run_views import read_last_output_lines, warn_of_unreadable_lines
from clusterctl.cli.status_views import build_report_view
from clusterctl.config.spec import load_spec
from clusterctl.formatting import plural
from clusterctl.render import run_messages
from clusterctl.render.charts import TimelineEvent
from clusterctl.render.console import Terminal
from clusterctl.render.report_page import ReportData, render_report_page
from clusterctl.render.run_trace import build_run_trace
from clusterctl.render.trace_events import encode_trace
from clusterctl.run.record.health_history import DeepResults, read_deep_results
from clusterctl.run.record.rundir import RunDir, find_runs_root
from clusterctl.run.record.sample_files import read_curves
from clusterctl.run.record.state_reader import (
    StampedNodeEvent,
    StateReader,
    TimedControllerEvent,
    find_run_to_read,
    load_state_and_attendance,
)
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunState

_FAILURE_EVENTS = (controller_events.StartFailed, controller_events.StallChanged, controller_events.AttemptEndDecided)
_WARNING_STARTS = ("warn:", "warning:", "unhealthy:", "lost")
_MAX_LAST_LINES, _MAX_LAST_BYTES, _MAX_RANKS = 30, 16 << 10, 8


@click.command("report", cls=CliCommand)
@options.run_argument
@click.option(
    "--trace",
    "is_trace",
    is_flag=True,
    help="Write a trace for ui.perfetto.dev: attempts, restarts, stalls, checkpoints, links, ranks, steps and load.",
)
@options.output_option("RUN.html, or RUN.trace.json with --trace")
@click.pass_obj
def command(common: CommonOptions, reference: str | None, output: str | None, *, is_trace: bool) -> int:
    """Write a report of a run as one HTML page that needs no network and no scripts.

    The report shows the job, a timeline, steps and speed, GPUs and nodes over time, stragglers, findings of the checks,
    the last deep check, the failure with its cause, and the last lines of output. With `--trace` the report is a trace
    in the JSON format of Chrome. `report` reads only files on this head and connects to no node.
    """
    console = common.console()
    run = find_run_to_read(reference)
    terminal = Terminal(io.StringIO(), colour=False, live=False, unicode=True)
    state, attended, events = _load_state_and_timeline(run, terminal)
    warn_of_unreadable_lines(state, console)
    curves = read_curves(
        run, {node: state.clock_ahead_s(node) for node in dict.fromkeys(node for _, node, _ in state.placements)}
    )
    view = build_report_view(run, state, has_controller=attended, step=curves.find_slowest_step(state.running_since))
    state = view.state
    if is_trace:
        trace = build_run_trace(state, StateReader(run).refresh(), events, curves, time.time())
        write_output(console, output, f"{run.run}.trace.json", encode_trace(trace), quiet=common.quiet)
        return 0
    deep = _read_deep_results(run)
    text = render_report_page(
        ReportData(
            run=view,
            now=time.time(),
            events=events,
            curves=curves,
            findings=load_findings(run),
            failure_report=render_failure(run, state, terminal),
            last_lines=list(_read_last_lines(run, state)),
            measurements=[m for m in deep.measurements if m.members <= state.nodes.keys()] if deep else [],
            measured=deep.time if deep else None,
        )
    )
    write_output(console, output, f"{run.run}.html", text, quiet=common.quiet)
    return 0


def _load_state_and_timeline(run: RunDir, terminal: Terminal) -> tuple[RunState, bool, list[TimelineEvent]]:
    """Return the state of a run, whether it has a controller, and its timeline, from one reading of the journals."""
    events: list[TimelineEvent] = []

    def load(run: RunDir) -> RunState:
        state, told = _build_timeline(run, terminal)
        events.extend(told)
        return state

    state, attended = load_state_and_attendance(run, load)
    return state, attended, events


def _build_timeline(run: RunDir, terminal: Terminal) -> tuple[RunState, list[TimelineEvent]]:
    """Return the state of a run, and its events in the order of time."""
    reader, formatter, found = StateReader(run), EventFormatter(run, terminal), list[TimelineEvent]()

    def add_controller_event(news: TimedControllerEvent) -> None:
        moment, event = news
        match event:
            case controller_events.AttemptStarted():
                size = f"{plural(event.world_size, 'rank')} on {plural(len(event.nodes), 'node')}"
                goes_on = f", from {event.resume_from}" if event.resume_from else ""
                found.append(
                    TimelineEvent(time=moment, label=f"attempt {event.attempt} begins: {size}{goes_on}", tone="dim")
                )
            case controller_events.RunEnded():
                tone = "good" if event.state == "succeeded" else "bad"
                found.append(
                    TimelineEvent(time=moment, label=f"{event.state} (exit code {event.exit_code})", tone=tone)
                )
            case _:
                lines = formatter.format_past_event(moment, event, reader.state)
                tone = (
                    "bad"
                    if isinstance(event, _FAILURE_EVENTS)
                    else "warn"
                    if str(lines[:1]).startswith(_WARNING_STARTS, 2)
                    else "dim"
                )
                found.extend(TimelineEvent(time=moment, label=line, tone=tone) for line in lines[:1])

    def add_node_event(news: StampedNodeEvent) -> None:
        node, stamp, event = news
        if isinstance(event, run_messages.EVENTS_WITHOUT_MESSAGE):
            return
        lines = formatter.format_node_event(node, stamp, event, reader.state)
        moment = stamp.wall - reader.state.clock_ahead_s(node)
        found.extend(TimelineEvent(time=moment, label=line, tone="warn") for line in lines[:1])

    reader.apply_new_events(add_controller_event, add_node_event)
    return reader.state, sorted(found, key=lambda tick: tick.time)


def _read_deep_results(run: RunDir) -> DeepResults | None:
    """Return the newest deep check of the cluster file of a run."""
    try:
        return read_deep_results(find_runs_root().parent, load_spec(run.spec.read_text()))
    except (OSError, ValueError):
        return None


def _read_last_lines(run: RunDir, state: RunState) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the last output lines of each failed rank, then those of the first ranks."""
    failed = [cause.rank for cause in state.causes if cause.rank is not None]
    for rank in list(dict.fromkeys([*failed, *sorted(state.workers)]))[:_MAX_RANKS]:
        worker = state.workers.get(rank)
        if worker is not None:
            lines = read_last_output_lines(
                run.node(worker.node) / format_output_path(state.attempt, rank), _MAX_LAST_BYTES
            )
            if lines:
                yield f"rank {rank} on {worker.node}", lines[-_MAX_LAST_LINES:]
