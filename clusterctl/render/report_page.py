"""The HTML page of `clusterctl report`: facts, events, speed, machines and end of a run.

The template is `report.html.j2`. All values in the template are escaped and sanitized, so that they can neither become
tags nor control a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import format_duration, plural
from clusterctl.health.deep.measurements import Measurement
from clusterctl.logs.safe_text import clean_text, strip_colours
from clusterctl.render import charts
from clusterctl.render.attempt_table import describe_cause, list_attempt_spans
from clusterctl.render.charts import Bar, Chart, TimeAxis, TimelineEvent, make_chart
from clusterctl.render.console import UNICODE
from clusterctl.render.deep_charts import make_dot_rows
from clusterctl.render.goodput_text import describe_goodput
from clusterctl.render.log_output import format_local_time
from clusterctl.render.run_messages import format_step
from clusterctl.render.status_report import RunSnapshot, describe_commit
from clusterctl.render.terminal_sanitizer import sanitize_line
from clusterctl.run.record.sample_files import Curves, Point
from clusterctl.run.rules.outcome import find_final_cause, list_end_warnings
from clusterctl.run.rules.state import RunState

_MAX_CHARACTERS = 2000
"""The largest number of characters of a text on the page. The log has the whole text."""
_MAX_EVENTS = 200
_MAX_RANKS = 16
_SLOW = 0.9
"""The share of the median speed below which a rank is a straggler."""
_TONES = {"succeeded": "good", "failed": "bad", "lost": "bad", "cancelled": "warn"}
_MACHINES = {
    "gpu": ("GPU utilisation, mean of a node", "%"),
    "gpu memory": ("GPU memory, fullest of a node", "%"),
    "temperature": ("GPU temperature, hottest of a node", "°C"),
    "power": ("GPU power of a node", "W"),
    "cpu": ("CPU", "%"),
    "memory": ("Memory", "%"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRow:
    """A finding of the health checks before the start, and all nodes with this finding."""

    status: str
    check: str
    message: str
    nodes: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """The values that the report page shows.

    Attributes:
        run: The snapshot of the run.
        now: The head's wall clock.
        events: The events of the run in the order of time.
        curves: Steps of ranks and samples of machines over time.
        findings: Findings of the checks before the start.
        failure_report: Lines with the report of the end of the run and the verdict of `why`.
        last_lines: The last lines of output, each group with its title.
        measurements: The newest deep measurements of the nodes.
        measured: When these were taken.
    """

    run: RunSnapshot
    now: float
    events: Sequence[TimelineEvent]
    curves: Curves
    findings: Sequence[FindingRow]
    failure_report: Sequence[str]
    last_lines: Sequence[tuple[str, Sequence[str]]]
    measurements: Sequence[Measurement] = ()
    measured: float | None = None


def render_report_page(data: ReportData) -> str:
    """Return the page of a run as HTML."""
    state = data.run.state
    ended = data.now if state.ended is None else state.ended
    axis = TimeAxis(ended - 1.0 if state.created is None else state.created, ended)
    speeds = {rank: compute_speed(points) for rank, points in data.curves.steps.items()}
    half = _MAX_EVENTS // 2
    is_cut = len(data.events) > _MAX_EVENTS
    return load_page_template("report.html.j2").render(
        data=data,
        state=state,
        tone=_TONES.get(state.phase.value, "dim"),
        facts=_facts(data.run, ended),
        warnings=list_end_warnings(state),
        axis=axis,
        dot_rows=make_dot_rows(data.measurements),
        bars=_attempt_bars(state, axis),
        first_events=list(data.events[:half] if is_cut else data.events),
        last_events=list(data.events[-half:] if is_cut else ()),
        step_charts=_step_charts(data.curves, axis),
        speed_rows=_speed_rows(speeds),
        straggler_rows=_straggler_rows(state, speeds),
        machine_charts=_present(
            make_chart(title, unit, data.curves.machines.get(what, {}), axis)
            for what, (title, unit) in _MACHINES.items()
        ),
    )


def load_page_template(name: str) -> Template:
    """Return a template of this folder that sanitizes and escapes every value."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else sanitize_page_text(value),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"n": charts.format_coordinate, "clock": format_local_time, "hosts": fold_hosts}
    environment.globals |= {
        "width": charts.WIDTH,
        "chart_height": charts.HEIGHT,
        "left": charts.LEFT,
        "right": charts.WIDTH - charts.RIGHT,
        "colours": charts.TONES,
    }
    return environment.get_template(name)


def sanitize_page_text(value: object) -> str:
    """Return a text as one line of limited length without control characters; jinja2 escapes it afterwards."""
    whole = " ".join(str(value).splitlines())
    more = len(whole) - _MAX_CHARACTERS
    line = sanitize_line(strip_colours(clean_text(whole[:_MAX_CHARACTERS])))
    return " ".join(line.splitlines()) + (f" [{more:,} more characters]" if more > 0 else "")


def _facts(view: RunSnapshot, ended: float) -> list[tuple[str, str]]:
    """Return the names and values of the page's first table; the page omits empty values."""
    state, origin = view.state, view.origin
    cause = find_final_cause(state)
    began = state.created
    facts = [
        ("why", "" if cause is None else describe_cause(cause, with_message=True)),
        ("started", "" if began is None else format_local_time(began)),
        ("took", "" if began is None else format_duration(ended - began) + ("" if state.is_over else ", and goes on")),
        ("exit code", "" if state.exit_code is None else str(state.exit_code)),
        ("size", f"{plural(len(state.workers), 'rank')} on {plural(len(state.nodes), 'node')}"),
        ("nodes", fold_hosts(state.nodes)),
        ("goodput", "".join(describe_goodput(view.goodput, UNICODE)).removeprefix("goodput ")),
        ("step", "" if view.step is None else format_step(view.step, state.attempt)),
    ]
    if origin is not None:
        facts += [
            ("by", f"{origin.user}@{origin.host}" if origin.user else ""),
            ("runs", origin.command),
            ("file", origin.file),
            ("code", "" if origin.commit is None else describe_commit(origin.commit)),
        ]
    return facts


def _attempt_bars(state: RunState, axis: TimeAxis) -> list[Bar]:
    bars = []
    for number, began, ended, how in list_attempt_spans(state):
        left, right = (axis.x_at(time) for time in (began or axis.begin, axis.end if ended is None else ended))
        tone = _TONES.get(state.phase.value, "dim") if number == state.attempt else "bad"
        bars.append(Bar(x=left, width=max(2.0, right - left), label=f"attempt {number}: {how}", tone=tone))
    return bars


def compute_speed(points: Sequence[Point]) -> float | None:
    """Return steps per second over the periods in which a rank made progress; `None` if it made none."""
    gained = took = 0.0
    for (before, one), (after, other) in pairwise(points):
        if other >= one and after > before:
            gained, took = gained + other - one, took + after - before
    return gained / took if gained > 0.0 and took > 0.0 else None


def _step_charts(curves: Curves, axis: TimeAxis) -> list[Chart]:
    steps = {f"rank {rank}": points for rank, points in curves.steps.items()}
    rates = {
        name: [
            (after, (other - one) / (after - before))
            for (before, one), (after, other) in pairwise(points)
            if after > before and other >= one
        ]
        for name, points in steps.items()
    }
    return _present([make_chart("Step", "", steps, axis), make_chart("Speed", "steps a second", rates, axis)])


def _present(found: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in found if chart is not None]


def _speed_rows(speeds: Mapping[int, float | None]) -> list[list[str]]:
    if len(speeds) > _MAX_RANKS or all(value is None for value in speeds.values()):
        return []
    return [[str(rank), "-" if value is None else f"{value:.2f}"] for rank, value in sorted(speeds.items())]


def _straggler_rows(state: RunState, speeds: Mapping[int, float | None]) -> list[list[str]]:
    """Return the ranks that were clearly slower than the others, slowest first."""
    known = {rank: value for rank, value in speeds.items() if value is not None}
    if len(known) < 2:
        return []
    middle = median(known.values())
    slow = sorted((value, rank) for rank, value in known.items() if value < _SLOW * middle)[:_MAX_RANKS]
    return [
        [str(rank), state.workers[rank].node if rank in state.workers else "", f"{value:.2f}", f"{value / middle:.0%}"]
        for value, rank in slow
    ]
