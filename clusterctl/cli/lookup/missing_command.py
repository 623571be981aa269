"""Whether a login shell of a node finds the command that a rank of a run did not find."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.cli.lookup.reach import reachable
from clusterctl.cli.lookup.remote import Remote
from clusterctl.config.spec import load_spec
from clusterctl.errors import ClusterctlError
from clusterctl.render.live_view import WaitingLine
from clusterctl.why.headline import parse_missing_command
from clusterctl.why.verdict import Class

if TYPE_CHECKING:
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.why.verdict import Verdict

_LIMIT_S = 10.0


def with_login_path(run: RunDir, verdict: Verdict) -> Verdict:
    """Return a verdict with what a login shell finds; as it is where no command is missing, or nobody can look."""
    culprit = next((one for one in verdict.culprits if one.node is not None), None)
    name = parse_missing_command(culprit.evidence) if culprit is not None else None
    if verdict.cls is not Class.COMMAND_NOT_FOUND or culprit is None or culprit.node is None or name is None:
        return verdict
    with contextlib.suppress(ClusterctlError, OSError):
        path = _path_of(run, culprit.node, name)
        if path is None:
            return replace(verdict, missing=(*verdict.missing, f"{culprit.node} could not be asked for `{name}`"))
        if not path:
            return replace(
                verdict, summary=f"{verdict.summary}; a login shell of {culprit.node} has no `{name}` either"
            )
        folder = path.rpartition("/")[0]
        remedy = f"put `export PATH={folder}:$PATH` into `job.prologue`"
        found = f"; a login shell of {culprit.node} finds {path}, which ranks do not have on PATH"
        return replace(verdict, summary=f"{verdict.summary}{found}", next=(remedy, *verdict.next))
    return verdict


def _path_of(run: RunDir, node: str, name: str) -> str | None:
    """Return where a login shell finds a program, "" where it does not; `None` where the node does not answer."""
    spec = load_spec(run.spec.read_text())
    hosts = [host for host in spec.hosts if host.name == node]
    remote = Remote({"argv": ["bash", "-lc", 'type -P -- "$0"', name]}, _LIMIT_S, 1, None)
    with (
        reachable(spec, hosts, remote.begin, of_run=True) as (sessions, _),
        WaitingLine(sessions, 0.0, None, stage="running") as waiting,
    ):
        answers, _ = remote.ends(sessions, waiting)
    answer = answers.get(node)
    if answer is None or answer.exit_code not in (0, 1):
        return None
    lines = answer.stdout.decode("utf-8", "replace").split()
    return lines[-1] if lines and answer.exit_code == 0 else ""
