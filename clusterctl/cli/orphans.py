"""Runs that live on nodes although this head does not know them: its state was lost, or another head began them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from clusterctl.agent import protocol as wire
from clusterctl.agent.protocol import Command
from clusterctl.cli import options
from clusterctl.cli.reach import reachable
from clusterctl.errors import ExitCode, NodesError
from clusterctl.run.links import each

if TYPE_CHECKING:
    from clusterctl.render.console import Console
    from clusterctl.session import Session

_CALL_SECONDS = 20.0
_GRACE = 10.0
_PATIENCE = 60.0


def end_orphans(path: str, console: Console, *, as_json: bool) -> int:
    """End every live run on the nodes of a cluster file that no run directory of this head stands for."""
    from clusterctl.run.store import all_runs

    spec = options.load_file(path, (), (), console=console).spec
    known = {run.run for run in all_runs()}
    with reachable(spec, spec.hosts) as (sessions, errors):
        listed, _ = each(sessions, lambda _, s: s.call(Command.RUNS, {}, timeout=_CALL_SECONDS)["runs"])
        orphans = [(n, r) for n, runs in listed.items() for r in runs if r["live"] and r["run"] not in known]
        remaining = [_end(sessions[node], run) for node, run in orphans]
    left = [entry for found in remaining for entry in found]
    runs = sorted({run["run"] for _, run in orphans})
    if as_json:
        ended = [{"run": r, "state": "cancelled", "remaining": [x for x in left if x["run"] == r]} for r in runs]
        console.data(json.dumps(ended, indent=2))
    else:
        console.narrate(f"ended {', '.join(runs)}" if runs else "no run here that this head does not know")
    if errors:
        raise NodesError(list(errors.values()))
    return int(ExitCode.TEARDOWN_INCOMPLETE if left else ExitCode.OK)


def _end(session: Session, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Stop one orphan on one node; return what is left of it."""
    asked = {"run": run["run"], "node": run["node"]}
    session.epoch = int(session.call(Command.STATUS, asked, timeout=_CALL_SECONDS).get("epoch") or 0) + 1
    stop = wire.Stop(run=run["run"], node=run["node"], grace=_GRACE, reason=wire.StopReason.CANCELLED.value)
    session.call(Command.STOP, wire.to_wire(stop), timeout=_CALL_SECONDS)
    deadline = time.monotonic() + _GRACE + _PATIENCE
    alive: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        status = session.call(Command.STATUS, asked, timeout=_CALL_SECONDS)
        alive = [w for w in status.get("workers", []) if w.get("alive")]
        if not alive:
            break
        time.sleep(0.5)
    finish = {**asked, "state": "cancelled", "exit_code": int(ExitCode.CANCELLED)}
    session.call(Command.FINISH, finish, timeout=_CALL_SECONDS)
    return [
        {**asked, "pid": w["pid"], "start_time": w.get("start_time"), "command": None, "why": "alive"} for w in alive
    ]
