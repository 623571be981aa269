"""Loads the problems of a run for the pages of `report` and `serve`, only from files on this head."""

from __future__ import annotations

import json

from clusterctl.cli.follow.exit_report import list_workdirs_of_failed_run
from clusterctl.cli.verdicts import load_verdict
from clusterctl.render.console import Terminal
from clusterctl.render.end_report import ReportContext, render_end_report, render_verdict
from clusterctl.render.report_page import FindingRow
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import find_memory_before_kill
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.why.verdict import ProblemKind


def render_failure(run: RunDir, state: RunState, terminal: Terminal) -> list[str]:
    """Return lines with the final report of a run and the verdict of `why`; no lines for a run without a problem."""
    well = state.phase is RunPhase.SUCCEEDED or (not state.is_over and state.stall is None)
    if well:
        return []
    context = ReportContext(
        folders=list_workdirs_of_failed_run(run, state), node_memory=find_memory_before_kill(run, state)
    )
    verdict = load_verdict(run, state, live=False)
    if state.phase is RunPhase.CANCELLED and verdict.kind is ProblemKind.NONE and not state.remaining:
        return []  # the user stopped a run that had no problem
    ended = render_end_report(state, terminal, context) if state.is_over else []
    return [*ended, "", *render_verdict(verdict, terminal)]


def load_findings(run: RunDir) -> list[FindingRow]:
    """Return the findings of the checks before the start; equal findings of several nodes are merged."""
    try:
        found = json.loads((run.path / "health.json").read_bytes())["findings"]
        known = [(str(f["status"]), str(f["check"]), str(f["message"]), f["node"]) for f in found]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    alike: dict[tuple[str, str, str], list[str]] = {}
    for status, check, message, node in known:
        if status not in ("PASS", "SKIP"):
            alike.setdefault((status, check, message), []).extend([] if node is None else [str(node)])
    rows = [FindingRow(status=s, check=c, message=m, nodes=nodes) for (s, c, m), nodes in alike.items()]
    return sorted(rows, key=lambda one: one.status != "FAIL")
