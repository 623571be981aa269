"""The page of a run: what it is, what happened, how fast, on what machines, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import format_duration, plural
from clusterctl.render.attempts import attempt_spans, cause_words
from clusterctl.render.charts import Bar, Span, Tick, chart, timeline
from clusterctl.render.html import Html, block, element, page, pairs, section, table
from clusterctl.render.run_messages import step_of
from clusterctl.render.status import commit_words
from clusterctl.run.rules.end_warnings import list_end_warnings
from clusterctl.run.rules.outcome import find_final_cause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.render.status import RunView
    from clusterctl.run.record.sample_files import Curves, Point
    from clusterctl.run.rules.state import RunState

_MOST_EVENTS = 200
_MOST_FINDINGS = 60
_MOST_RANKS = 16
_SLOW = 0.9
"""A rank that is slower than this share of the middle one is a straggler."""
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
class Found:
    """What a check said before the start, with the nodes of which it said the same."""

    status: str
    check: str
    message: str
    nodes: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """All that the page tells.

    Attributes:
        view: The run.
        now: The head's wall clock.
        events: What happened, in the order of time.
        curves: What ranks and machines did.
        findings: What checks said before the start.
        failure: The report of its end, and the verdict of `why`, as lines of a terminal.
        ends: Last lines of output: whose, and which.
    """

    view: RunView
    now: float
    events: Sequence[Tick]
    curves: Curves
    findings: Sequence[Found]
    failure: Sequence[str]
    ends: Sequence[tuple[str, Sequence[str]]]


def story(told: Told) -> str:
    """Return the page of a run."""
    state = told.view.state
    ended = told.now if state.ended is None else state.ended
    span = Span(ended - 1.0 if state.created is None else state.created, ended)
    speeds = {rank: speed(points) for rank, points in told.curves.steps.items()}
    return page(
        f"{state.run}: {state.phase.value}",
        element("h1", state.run, " ", element("span", state.phase.value, class_=_TONES.get(state.phase.value, "dim"))),
        _head(told.view, ended),
        section("What went wrong", block(told.failure) if told.failure else ""),
        section("Warnings", block(warned) if (warned := list_end_warnings(state)) and not told.failure else ""),
        _happened(state, told.events, span),
        section("Steps", *_steps(told.curves, speeds, span)),
        _stragglers(state, speeds),
        section("Machines", *_machines(told.curves, span)),
        _health(told.findings),
        section("Last lines", *(element("div", element("b", whose), block(lines)) for whose, lines in told.ends)),
        element("p", f"written {_clock(told.now)} by `clusterctl report`", class_="dim"),
    )


def _head(view: RunView, ended: float) -> Html:
    state, origin = view.state, view.origin
    cause = find_final_cause(state)
    began = state.created
    values: dict[str, Html | str] = {
        "why": "" if cause is None else cause_words(cause, message=True),
        "started": "" if began is None else _clock(began),
        "took": "" if began is None else format_duration(ended - began) + ("" if state.over else ", and goes on"),
        "exit code": "" if state.exit_code is None else str(state.exit_code),
        "size": f"{plural(len(state.workers), 'rank')} on {plural(len(state.nodes), 'node')}",
        "nodes": fold_hosts(state.nodes),
        "step": "" if view.step is None else step_of(view.step, state.attempt),
    }
    if origin is not None:
        values |= {
            "by": f"{origin.user}@{origin.host}" if origin.user else "",
            "runs": origin.command,
            "file": origin.file,
            "code": "" if origin.commit is None else commit_words(origin.commit),
        }
    return pairs(values)


def _happened(state: RunState, events: Sequence[Tick], span: Span) -> Html:
    bars = [
        Bar(
            begin=span.begin if began is None else began,
            end=span.end if ended is None else ended,
            label=f"attempt {number}: {how}",
            tone=_TONES.get(state.phase.value, "dim") if number == state.attempt else "bad",
        )
        for number, began, ended, how in attempt_spans(state)
    ]
    rows = [[_clock(tick.time), element("span", tick.label, class_=tick.tone)] for tick in events]
    if len(rows) > _MOST_EVENTS:
        half = _MOST_EVENTS // 2
        rows[half:-half] = [["", f"… {len(rows) - 2 * half} more …"]]
    shown = [*events[: _MOST_EVENTS // 2], *events[-_MOST_EVENTS // 2 :]] if len(events) > _MOST_EVENTS else events
    return section("What happened", timeline(bars, shown, span), table((), rows) if rows else "")


def speed(points: Sequence[Point]) -> float | None:
    """Return steps a second over all times in which a rank went forward; `None` where it never did."""
    gained = took = 0.0
    for (before, one), (after, other) in pairwise(points):
        if other >= one and after > before:
            gained, took = gained + other - one, took + after - before
    return gained / took if gained > 0.0 and took > 0.0 else None


def _steps(curves: Curves, speeds: Mapping[int, float | None], span: Span) -> list[Html]:
    by_rank = {f"rank {rank}": points for rank, points in curves.steps.items()}
    rates = {f"rank {rank}": _rates(points) for rank, points in curves.steps.items()}
    known = [value for value in speeds.values() if value is not None]
    rows = [[str(rank), "-" if value is None else f"{value:.2f}"] for rank, value in sorted(speeds.items())]
    few = table(("rank", "steps a second"), rows) if known and len(rows) <= _MOST_RANKS else Html()
    return [chart("Step", "", by_rank, span), chart("Speed", "steps a second", rates, span), few]


def _rates(points: Sequence[Point]) -> list[Point]:
    return [
        (after, (other - one) / (after - before))
        for (before, one), (after, other) in pairwise(points)
        if after > before and other >= one
    ]


def _stragglers(state: RunState, speeds: Mapping[int, float | None]) -> Html:
    """Return the ranks that were clearly slower than the others, the slowest first."""
    known = {rank: value for rank, value in speeds.items() if value is not None}
    if len(known) < 2:
        return Html()
    middle = median(known.values())
    slow = sorted((value, rank) for rank, value in known.items() if value < _SLOW * middle)[:_MOST_RANKS]
    rows = [
        [str(rank), state.workers[rank].node if rank in state.workers else "", f"{value:.2f}", f"{value / middle:.0%}"]
        for value, rank in slow
    ]
    return section("Stragglers", table(("rank", "node", "steps a second", "of the middle"), rows) if rows else "")


def _machines(curves: Curves, span: Span) -> list[Html]:
    return [
        chart(title, unit, curves.machines[what], span)
        for what, (title, unit) in _MACHINES.items()
        if what in curves.machines
    ]


def _health(findings: Sequence[Found]) -> Html:
    rows: list[list[Html | str]] = [
        [
            element("span", found.status, class_="bad" if found.status == "FAIL" else "warn"),
            found.check,
            fold_hosts(found.nodes),
            found.message,
        ]
        for found in findings[:_MOST_FINDINGS]
    ]
    more = len(findings) - _MOST_FINDINGS
    rows += [["", f"and {more} more", "", ""]] if more > 0 else []
    return section("Health before the start", table(("", "check", "nodes", "said"), rows) if rows else "")


def _clock(time: float) -> str:
    return f"{datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M:%S}"
