"""Runs that live on nodes although this head does not know them: its state was lost, or another head began them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.commands import Command
from clusterctl.cli import options
from clusterctl.cli.lookup.reach import reachable
from clusterctl.errors import AgentError, ExitCode, NodesError
from clusterctl.run.nodes.ending import end_on_node
from clusterctl.run.nodes.links import each

if TYPE_CHECKING:
    from clusterctl.render.terminal.console import Console
    from clusterctl.session.conversation import Session

_CALL_SECONDS = 20.0
_GRACE = 10.0


def end_orphans(path: str, console: Console, *, as_json: bool) -> int:
    """End every live run on the nodes of a cluster file that no run directory of this head stands for."""
    from clusterctl.render.errors import remaining_lines
    from clusterctl.run.record.writer import all_runs

    spec = options.load_file(path, (), (), console=console).spec
    known = {run.run for run in all_runs()}
    with reachable(spec, spec.hosts) as (sessions, errors):
        listed, _ = each(sessions, lambda _, s: s.call(Command.RUNS, {}, timeout=_CALL_SECONDS)["runs"])
        orphans = {n: [r for r in runs if _left(r) and r["run"] not in known] for n, runs in listed.items()}
        concerned = {node: sessions[node] for node, runs in orphans.items() if runs}
        ended, failed = each(concerned, lambda node, session: _end_all(session, orphans[node]))
    errors |= {node: AgentError(node, str(error)) for node, error in failed.items()}
    left = [entry for found in ended.values() for entry in found]
    runs = sorted({run["run"] for found in orphans.values() for run in found})
    if as_json:
        told = [{"run": r, "state": "cancelled", "remaining": [x for x in left if x["run"] == r]} for r in runs]
        console.json(told)
    else:
        console.narrate(f"ended {', '.join(runs)}" if runs else "no run here that this head does not know")
        console.narrate(*remaining_lines(left, console.err))
    if errors:
        raise NodesError(list(errors.values()))
    return int(ExitCode.TEARDOWN_INCOMPLETE if left else ExitCode.OK)


def _left(run: dict[str, Any]) -> bool:
    """Return whether something of a run is there: workers, what they left, or a supervisor that waits for commands."""
    return bool(run["live"] or run["supervisor"])


def _end_all(session: Session, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stop the orphans of one node; return what is left of them."""
    left = []
    for run in runs:
        session.epoch = int(run["epoch"]) + 1
        found = end_on_node(session, run["run"], run["node"], float(run.get("grace") or _GRACE))
        left += [{"run": run["run"], **entry} for entry in found]
    return left
