"""Where the ranks of a live run are now, through its controller or without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.cli.lookup.reach import reachable
from clusterctl.config.spec import load_spec
from clusterctl.run.controller import control_socket
from clusterctl.run.nodes.evidence import Evidence, collect_evidence

if TYPE_CHECKING:
    from collections.abc import Collection

    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


def look(run: RunDir, state: RunState, ranks: Collection[int] | None = None) -> Evidence:
    """Ask for states and stacks of the ranks, or of these alone."""
    try:
        answer = control_socket.send_request(run, "evidence", {"ranks": None if ranks is None else sorted(ranks)})
    except control_socket.NoControllerError:
        return _without_controller(run, state, ranks)
    return Evidence(ranks=answer["ranks"], errors=answer["errors"])


def _without_controller(run: RunDir, state: RunState, ranks: Collection[int] | None) -> Evidence:
    spec = load_spec(run.spec.read_text())
    hosts = [host for host in spec.hosts if host.name in state.nodes]
    with reachable(spec, hosts, of_run=True) as (sessions, errors):
        evidence = collect_evidence(run.run, "stacks", sessions, ranks)
    unseen = {node: str(error) for node, error in errors.items()}
    return Evidence(ranks=evidence.ranks, errors={**unseen, **evidence.errors})
