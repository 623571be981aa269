"""The page of `clusterctl serve`, and the values that it shows, as JSON. Pure.

The page is one file that loads nothing: `live_page.html`. Its script gets the values as server-sent events
(https://html.spec.whatwg.org/multipage/server-sent-events.html), and inserts every text as text. In addition, each text
is sanitized here, so that it cannot reorder or hide other text.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import group_pairs
from clusterctl.logs.log_line import LogLine
from clusterctl.render.charts import Points, TimeAxis, filter_drawable_points, select_curves
from clusterctl.render.console import UNICODE, Terminal
from clusterctl.render.goodput_text import describe_goodput
from clusterctl.render.report_page import FindingRow, sanitize_page_text
from clusterctl.render.run_list import ps_json
from clusterctl.render.run_messages import describe_worker
from clusterctl.render.status_report import RunSnapshot, describe_commit, render_run_summary
from clusterctl.render.top_rows import TopData, TopUnit, list_top_units

TERMINAL = Terminal(io.StringIO(), colour=False, live=False, unicode=True)
"""Renders the lines that the page shares with the commands."""
_MAX_FINDINGS = 60
_sanitize_text = lru_cache(maxsize=1 << 14)(sanitize_page_text)


class LivePage(NamedTuple):
    """The page, and the content security policy that permits its own script and style alone."""

    html: bytes
    policy: str


def load_live_page() -> LivePage:
    """Return the page; the policy contains the hashes of its script and style."""
    html = (Path(__file__).parent / "live_page.html").read_text(encoding="utf-8")
    sources = {}
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources[tag] = f"{tag}-src 'sha256-{digest}'"
    rest = "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    trusted = "require-trusted-types-for 'script'; trusted-types 'none'"
    return LivePage(html.encode(), f"default-src 'none'; {sources['script']}; {sources['style']}; {rest}; {trusted}")


def encode_event(name: str, value: object) -> bytes:
    """Return a server-sent event; the texts in `value` are sanitized."""
    return f"event: {name}\ndata: {json.dumps(_sanitize(value), separators=(',', ':'))}\n\n".encode()


def _sanitize(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):  # JSON has no such number.
            return None
        case str():
            return _sanitize_text(value)
        case dict():
            return {_sanitize_text(str(key)): _sanitize(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_sanitize(inner) for inner in value]
        case _:
            return value


def runs_json(snapshots: Sequence[RunSnapshot]) -> list[dict[str, Any]]:
    """Return the list of runs, in the given order."""
    keys = ("run", "state", "attempt", "started", "ended", "nodes", "world_size", "step", "exit_code")
    return [{key: run[key] for key in keys} for run in ps_json(snapshots)]


def run_summary_json(data: TopData, view: RunSnapshot, now: float) -> dict[str, Any]:
    """Return the header of a run: its state, facts about it, and the lines about its problems."""
    state, origin = view.state, view.origin
    _, *problems = render_run_summary(view, now, TERMINAL)
    phases = Counter(describe_worker(worker) for worker in state.workers.values())
    rates = [rate for rate in data.step_rates.values() if rate > 0]
    facts = {
        "nodes": fold_hosts(state.nodes),
        "ranks": ", ".join(f"{count} {phase}" for phase, count in phases.most_common(4)),
        "speed": f"{median(rates):.2f} steps a second" if rates else "",
        "goodput": "".join(describe_goodput(view.goodput, UNICODE)).removeprefix("goodput "),
    }
    if origin is not None:
        facts |= {
            "by": f"{origin.user}@{origin.host}" if origin.user else "",
            "command": origin.command,
            "file": origin.file,
            "code": "" if origin.commit is None else describe_commit(origin.commit),
        }
    return {
        "run": state.run,
        "state": state.phase.value,
        "exit_code": state.exit_code,
        "attempt": state.attempt,
        "step": view.step,
        "began": state.created,
        "ended": state.ended,
        "facts": [[name, text] for name, text in facts.items() if text],
        "problems": [line.strip() for line in problems],
    }


def node_rows_json(data: TopData, view: RunSnapshot) -> dict[str, dict[str, Any]]:
    """Return a row of the heat map for each node, by node; `cells` has an item for each GPU or rank."""
    troubled = {(node, gpu) for node, gpu, _ in view.state.troubles} if not view.state.is_over else set()
    units = group_pairs((unit.node.node, unit) for unit in list_top_units(data))
    rows = {}
    for place, (name, of_node) in enumerate(units.items()):
        node = of_node[0].node
        rows[name] = {
            "place": place,
            "node": name,
            "state": view.state.find_node_phase(name).value if name in view.state.nodes else "",
            "time": None if node.time is None else round(node.time),
            "cpu": node.cpu,
            "trouble": (name, None) in troubled,
            "cells": [_cell_json(unit, is_troubled=(name, _gpu_of(unit)) in troubled) for unit in of_node],
        }
    return rows


def _gpu_of(unit: TopUnit) -> int | None:
    return -1 if unit.gpu is None else unit.gpu.gpu


def _cell_json(unit: TopUnit, *, is_troubled: bool) -> dict[str, Any]:
    gpu, worker = unit.gpu, unit.worker
    cell: dict[str, Any] = {"trouble": is_troubled, "step": unit.activity.step}
    if unit.step_rate is not None:
        cell["rate"] = round(unit.step_rate, 2)
    if worker is not None:
        cell |= {"rank": worker.rank, "state": describe_worker(worker), "bad": worker.failed}
    if gpu is not None:
        cell |= {"gpu": gpu.gpu, "util": gpu.util, "temp": gpu.temp_c, "power": gpu.power_w}
        cell |= {"used": gpu.mem_used, "total": gpu.mem_total}
    return cell


def findings_json(findings: Sequence[FindingRow]) -> list[list[str]]:
    """Return the findings of the checks before the start: status, check, nodes and message of each."""
    return [[one.status, one.check, fold_hosts(one.nodes), one.message] for one in findings[:_MAX_FINDINGS]]


def chart_json(title: str, unit: str, series: Mapping[str, Points], axis: TimeAxis) -> dict[str, Any] | None:
    """Return a chart over time: a few curves, each with its name and points; `None` if there is no value."""
    known = {name: filter_drawable_points(points) for name, points in series.items()}
    shown = select_curves(known, axis)
    if not shown:
        return None
    curves = [
        [name, [[round(time, 1), float(f"{value:.6g}")] for time, value in points]] for name, points in shown.items()
    ]
    return {"title": title, "unit": unit, "begin": axis.begin, "end": axis.end, "curves": curves}


def log_lines_json(lines: Iterable[LogLine]) -> list[list[Any]]:
    """Return lines of output: time, rank, node, attempt and text of each."""
    return [[round(line.time, 3), line.rank, line.node, line.attempt, line.text] for line in lines]
