"""Reads the runs that the browsers of `serve` show, once for all browsers, only from files on this head."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clusterctl.cli.run_data import RunDataReader
from clusterctl.cli.run_problems import load_findings, render_failure
from clusterctl.cli.run_views import make_sampled_activity
from clusterctl.logs.follow import LogFollower
from clusterctl.logs.log_line import LogLine, LogQuery, Skew
from clusterctl.logs.printed_values import PrintedSeries
from clusterctl.render import live_page
from clusterctl.render.charts import TimeAxis
from clusterctl.render.live_page import encode_event
from clusterctl.render.run_list import sort_runs
from clusterctl.render.status_report import RunSnapshot, WorkerActivity
from clusterctl.run.record import sample_files
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import Point
from clusterctl.run.record.state_reader import StateReader, list_runs, load_state_and_attendance, read_summary
from clusterctl.run.rules.state import RunState

MAX_RUNS = 100
"""The most runs in the list; the newest come first."""
MAX_RANKS = 64
"""The most ranks whose output a browser can follow at once."""
_LIST_INTERVAL_S, _NODES_INTERVAL_S, _CURVES_INTERVAL_S, _ENDED_INTERVAL_S = 5.0, 2.0, 30.0, 15.0
_FORGET_AFTER_S = 60.0
"""A run that no browser shows is forgotten after this time, so that a reload does not read all its files again."""
_MAX_LOG_LINES, _MAX_LOG_BATCHES = 400, 20
_MACHINES = {"gpu": ("GPU utilisation", "%"), "gpu memory": ("GPU memory", "%"), "power": ("GPU power of a node", "W")}


class Watch(NamedTuple):
    """What a browser shows: a run, and the ranks whose output it follows."""

    run: str
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveUpdate:
    """The present content of all pages, as server-sent events. Unchanged events are the same objects as before.

    Attributes:
        runs: The list of runs.
        sections: For each run: its events by a key.
        logs: For each watch: batches of output lines, by rising numbers.
    """

    runs: bytes = b""
    sections: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    logs: Mapping[Watch, Mapping[int, bytes]] = field(default_factory=dict)


class LiveReader:
    """Reads runs for `serve`. One thread at a time may call it."""

    def __init__(self) -> None:
        self._list = _RunList()
        self._feeds: dict[str, _RunFeed] = {}
        self._logs: dict[Watch, _LogFeed] = {}
        self._used: dict[str, float] = {}

    def find_run(self, name: str) -> RunDir | None:
        """Return the run with exactly this id; `None` if there is none."""
        return next((run for run in list_runs() if run.run == name), None)

    def read(self, watched: Collection[Watch]) -> LiveUpdate:
        """Return what the watchers show now."""
        now = time.time()
        self._used |= dict.fromkeys((watch.run for watch in watched), now)
        self._feeds = {run: feed for run, feed in self._feeds.items() if now - self._used[run] < _FORGET_AFTER_S}
        self._logs = {watch: feed for watch, feed in self._logs.items() if watch in watched}
        for name in {watch.run for watch in watched} - self._feeds.keys():
            if (run := self.find_run(name)) is not None:
                self._feeds[name] = _RunFeed(run)
        sections = {watch.run: self._feeds[watch.run].read(now) for watch in watched if watch.run in self._feeds}
        for watch in watched:
            if (feed := self._feeds.get(watch.run)) is not None:
                if watch not in self._logs:
                    self._logs[watch] = _LogFeed(feed.run, watch.ranks, feed.clock_ahead_s)
                self._logs[watch].refresh(is_over=feed.is_over)
        views = {name: feed.view for name, feed in self._feeds.items() if name in sections and feed.view is not None}
        return LiveUpdate(
            runs=self._list.read(now, views),
            sections=sections,
            logs={watch: log.batches for watch, log in self._logs.items()},
        )


class _RunList:
    """The list of runs. Runs that have ended are read once."""

    def __init__(self) -> None:
        self._due = -math.inf
        self._event = b""
        self._readers: dict[str, StateReader] = {}
        self._over: dict[str, RunSnapshot] = {}

    def read(self, now: float, views: Mapping[str, RunSnapshot]) -> bytes:
        if now >= self._due:
            self._due = now + _LIST_INTERVAL_S
            shown = [self._load(run, views.get(run.run), now) for run in list_runs()[-MAX_RUNS:]]
            event = encode_event("runs", live_page.runs_json(sort_runs(shown)))
            self._event = self._event if event == self._event else event
            self._readers = {v.state.run: r for v in shown if (r := self._readers.get(v.state.run)) is not None}
            self._over = {view.state.run: view for view in shown if view.state.is_over}
        return self._event

    def _load(self, run: RunDir, view: RunSnapshot | None, now: float) -> RunSnapshot:
        if (known := self._over.get(run.run) or view) is not None:
            return known
        if (end := read_summary(run.summary, run.events)) is not None:
            return RunSnapshot(state=end.state, has_controller=False, activity={0: WorkerActivity(step=end.step)})
        reader = self._readers.setdefault(run.run, StateReader(run))
        state, attended = load_state_and_attendance(run, lambda _: reader.load_state())
        newest = sample_files.read_latest_activities(run, state, sample_files.PROGRESS_FIELDS)
        return RunSnapshot(state=state, has_controller=attended, activity=make_sampled_activity(state, newest, now))


class _RunFeed:
    """The events of one run. Each of its parts is read at intervals of its own."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.view: RunSnapshot | None = None
        self._reader = RunDataReader(run, with_output_times=False)
        self.clock_ahead_s = self._reader.clock_ahead_s
        self._printed: PrintedSeries | None = None
        self._values: dict[str, object] = {}
        self._sections: dict[str, bytes] = {}
        self._nodes_due = self._curves_due = -math.inf
        self._failure_key: object = None

    @property
    def is_over(self) -> bool:
        return self.view is not None and self.view.state.is_over

    def read(self, now: float) -> Mapping[str, bytes]:
        if now < self._nodes_due:
            return self._sections
        is_first, was_over, self._nodes_due = self.view is None, self.is_over, now + _NODES_INTERVAL_S
        data = self._reader.load_data()
        self.view = view = data.view
        if view is None:
            return self._sections
        self._put("run", "run", live_page.run_summary_json(data, view, now))
        rows = live_page.node_rows_json(data, view)
        self._put("layout", "layout", [*rows])
        self._sections = {key: event for key, event in self._sections.items() if key[:1] != " " or key[1:] in rows}
        for node, row in rows.items():
            self._put(f" {node}", "row", row)
        self._put_failure(view)
        if is_first:
            self._nodes_due = now  # The curves follow with the next read, because the GPUs should appear soon.
            return self._sections
        if self.is_over:
            self._nodes_due = now + _ENDED_INTERVAL_S
        if now >= self._curves_due or (self.is_over and not was_over):
            self._curves_due = math.inf if self.is_over else now + _CURVES_INTERVAL_S
            self._put("curves", "curves", self._draw_curves(view.state, now))
        return self._sections

    def _put(self, key: str, event: str, value: object) -> None:
        if key not in self._sections or self._values.get(key) != value:
            self._values[key], self._sections[key] = value, encode_event(event, value)

    def _put_failure(self, view: RunSnapshot) -> None:
        """Judge the run again if its state has changed since the last time, because this takes long for many ranks."""
        state = view.state
        stall = None if state.stall is None else (state.stall.phase, state.stall.evidence)
        key = (state.phase, state.attempt, stall, view.verdict, sum(w.failed for w in state.workers.values()))
        if key == self._failure_key:
            return
        self._failure_key = key
        lines = render_failure(self.run, state, live_page.TERMINAL)
        ranks = [cause.rank for cause in state.causes if cause.rank is not None]
        self._put("failure", "failure", {"lines": lines, "rank": ranks[0] if ranks else None})
        self._put("findings", "findings", live_page.findings_json(load_findings(self.run)))

    def _draw_curves(self, state: RunState, now: float) -> list[dict[str, Any]]:
        if state.created is None or not state.workers:
            return []
        axis = TimeAxis(state.created, now if state.ended is None else state.ended)
        if self._printed is None:
            self._printed = PrintedSeries(self.run.path, min(state.workers), self.clock_ahead_s)
        nodes = dict.fromkeys(node for _, node, _ in state.placements)
        curves = sample_files.read_curves(self.run, {node: self.clock_ahead_s(node) for node in nodes})
        printed = self._printed.read()
        steps: dict[str, Sequence[Point]] = {f"rank {rank}": points for rank, points in curves.steps.items()}
        if not steps and "step" in printed:
            steps[f"printed by rank {min(state.workers)}"] = printed["step"]
        losses = {name: points for name, points in printed.items() if name != "step"}
        charts = [
            live_page.chart_json("Loss", f"printed by rank {min(state.workers)}", losses, axis),
            live_page.chart_json("Step", "", steps, axis),
            *(
                live_page.chart_json(title, unit, curves.machines.get(key, {}), axis)
                for key, (title, unit) in _MACHINES.items()
            ),
        ]
        return [chart for chart in charts if chart is not None]


class _LogFeed:
    """The output of some ranks of a run: the last lines, then new lines. `batches` has the newest, by number."""

    def __init__(self, run: RunDir, ranks: frozenset[int], skew: Skew) -> None:
        self.batches: dict[int, bytes] = {}
        query = LogQuery(ranks=ranks, tail=_MAX_LOG_LINES)
        self._follower = LogFollower(run.path, query, frame_interval=None, skew=skew)
        self._number = 0
        self._has_finished = False
        self._add(list(self._follower.history()))

    def refresh(self, *, is_over: bool) -> None:
        if self._has_finished:
            return
        self._has_finished = is_over
        for lines in self._follower.finish() if is_over else [self._follower.poll()]:
            self._add(lines)

    def _add(self, lines: Sequence[LogLine]) -> None:
        if lines:
            omitted = max(0, len(lines) - _MAX_LOG_LINES)
            value = {"number": self._number, "omitted": omitted, "lines": live_page.log_lines_json(lines[omitted:])}
            self.batches[self._number] = encode_event("log", value)
            self.batches.pop(self._number - _MAX_LOG_BATCHES, None)
            self._number += 1
