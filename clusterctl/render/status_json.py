"""`ps --json` and `status --json`: what their tables show, for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.formatting import signal_name
from clusterctl.render.status import RunView, WorkerActivity
from clusterctl.render.story.attempts import attempts_json
from clusterctl.render.story.book import origin_json, time_json
from clusterctl.render.story.listing import not_started
from clusterctl.render.story.timings import timings_json
from clusterctl.render.words import cause_json
from clusterctl.run.rules.end_warnings import list_end_warnings
from clusterctl.run.rules.outcome import find_final_cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.run.rules.controller_events import Health, Results
    from clusterctl.run.rules.state import StallView, WorkerState


def stall_json(stall: StallView | None, verdict: Any = None) -> dict[str, Any] | None:
    """Return what the stall rule says."""
    if stall is None:
        return None
    return {"since_s": stall.since_s, "limit_s": stall.limit_s, "phase": stall.phase, "verdict": verdict}


def ps_json(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """Return `ps --json`."""
    return [
        {
            "run": view.state.run,
            "name": view.state.name,
            "state": view.state.phase.value,
            "stall": stall_json(view.state.stall, view.verdict),
            "attended": view.attended,
            "attempt": view.state.attempt,
            "nodes": len(view.state.nodes),
            "world_size": view.state.world_size,
            "started": time_json(view.state.created),
            "ended": time_json(view.state.ended),
            "step": view.step,
            "last_progress_s": _rounded(view.last_progress_s),
            "exit_code": view.state.exit_code,
            "cause": cause_json(find_final_cause(view.state)),
            "remaining": list(view.state.remaining),
            "file": view.state.path or None,
            "not_started": not_started(view.state),
        }
        for view in views
    ]


def status_json(view: RunView) -> dict[str, Any]:
    """Return `status --json`."""
    state = view.state
    return {
        "run": state.run,
        "name": state.name,
        "state": state.phase.value,
        "attended": view.attended,
        "attempt": state.attempt,
        "exit_code": state.exit_code,
        "cause": cause_json(find_final_cause(state)),
        "stall": stall_json(state.stall, view.verdict),
        "health": [_trouble_json(event) for event in state.troubles.values()],
        "remaining": list(state.remaining),
        "warnings": list_end_warnings(state),
        "results": _results_json(state.results),
        "started": time_json(state.created),
        "ended": time_json(state.ended),
        "origin": origin_json(view.origin),
        "start": timings_json(view.start),
        "attempts": attempts_json(state, view.step),
        "nodes": [
            {
                "node": node.node,
                "node_rank": node.node_rank,
                "address": node.address,
                "state": state.node_phase(node.node).value,
            }
            for node in sorted(state.nodes.values(), key=lambda n: n.node_rank)
        ],
        "workers": [_worker_json(state.workers[rank], view) for rank in sorted(state.workers)],
    }


def _trouble_json(event: Health) -> dict[str, Any]:
    keys = ("node", "gpu", "check", "status", "message", "action")
    return {key: getattr(event, key) for key in keys}


def _results_json(results: Results | None) -> dict[str, Any] | None:
    if results is None:
        return None
    return {"to": results.to, "files": results.files, "bytes": results.bytes, "lacking": list(results.missing)}


def _worker_json(worker: WorkerState, view: RunView) -> dict[str, Any]:
    activity = view.activity.get(worker.rank, WorkerActivity())
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "node": worker.node,
        "pid": worker.pid,
        "state": worker.phase.value,
        "exit_code": worker.exit_code,
        "signal": None if worker.signal is None else signal_name(worker.signal),
        "stopped": worker.stopped,
        "step": activity.step,
        "last_output_s": _rounded(activity.last_output_s),
        "slow": view.slow.get(worker.rank),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
