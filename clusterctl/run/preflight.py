"""The checks before a start: every node probed at once by what would start its workers, judged, compared."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import Command
from clusterctl.errors import ClusterctlError, UnhealthyError
from clusterctl.health.judge import judge_cluster, judge_node, verdict
from clusterctl.health.model import Context, Status
from clusterctl.health.request import probe_request
from clusterctl.run.launch import Progress, workdir_of
from clusterctl.run.links import each
from clusterctl.run.store import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from clusterctl.config.spec import ClusterSpec
    from clusterctl.health.model import Finding
    from clusterctl.run.events import ControllerEvent
    from clusterctl.run.store import RunDir
    from clusterctl.session import Session

_MARGIN = 10.0


class Preflight:
    """Judges the nodes of a run before anything starts.

    Args:
        run: Keeps the facts and findings in `health.json`.
        spec: What is declared and tolerated.
        strict: WARN and UNKNOWN end the start too.
    """

    def __init__(self, run: RunDir, spec: ClusterSpec, *, strict: bool) -> None:
        self._run, self._spec, self._strict = run, spec, strict

    def __call__(self, sessions: Mapping[str, Session], post: Callable[[ControllerEvent], None]) -> None:
        """Check.

        Raises:
            UnhealthyError: A check failed; nothing was started.
        """
        step = Progress("health", len(sessions), post)
        facts = probe_all(self._spec, sessions, step, own_run=self._run.run)
        findings = judge_all(self._spec, facts)
        kept = {"facts": facts, "findings": [f.to_json() for f in findings]}
        write_atomically(self._run.path / "health.json", json.dumps(kept).encode())
        result = verdict(findings, self._strict)
        step.end(_summary(findings), failed=result is Status.FAIL)
        if result is Status.FAIL or (self._strict and result in (Status.WARN, Status.UNKNOWN)):
            wanted = (Status.FAIL, Status.WARN, Status.UNKNOWN) if self._strict else (Status.FAIL,)
            bad = [f for f in findings if f.status in wanted]
            raise UnhealthyError(
                f"{len(bad)} checks failed; nothing was started",
                bad,
                hint="`health.ignore` in the cluster file accepts a finding, `--no-health` skips all checks",
            )


def probe_all(
    spec: ClusterSpec, sessions: Mapping[str, Session], step: Progress, *, own_run: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return every node's facts; a node whose probe could not be had says why under `unreachable`."""
    hosts = {h.name: h for h in spec.hosts}
    peers = {n: str(s.hello.get("reached_at") or "") for n, s in sessions.items()}
    known = {n: a for n, a in peers.items() if a}

    def probe(node: str, session: Session) -> dict[str, Any]:
        step.at(node, "checking")
        host = hosts[node]
        workdir = workdir_of(spec, node)
        request = probe_request(spec, host, peers=known, workdir=workdir)
        prologue = spec.job.prologue if spec.job else None
        asked = {
            "python": host.python,
            "prologue": prologue,
            "env": {**spec.env, **host.env},
            "cwd": None,
            "request": request,
        }
        facts = session.call(Command.PROBE, asked, timeout=float(request["deadline"]) + _MARGIN)
        step.through(node)
        return {**facts, "controller": {"own_run": own_run} if own_run else {}}

    found, errors = each(dict(sessions), probe)
    return {n: found[n] if n in found else _unprobed(errors[n]) for n in sessions}


def _unprobed(error: ClusterctlError) -> dict[str, Any]:
    return {"unreachable": str(error)}


def judge_all(
    spec: ClusterSpec, facts: Mapping[str, dict[str, Any]], checks: Sequence[str] | None = None
) -> list[Finding]:
    """Return all findings: each node by itself, then the nodes against each other."""
    context = Context.from_spec(spec)
    single = [f for node, known in facts.items() for f in judge_node(node, known, context, checks)]
    return single + judge_cluster(facts, context, checks)


def _summary(findings: list[Finding]) -> str:
    counts = {s: sum(f.status is s for f in findings) for s in (Status.PASS, Status.WARN, Status.UNKNOWN, Status.FAIL)}
    return " · ".join(f"{n} {s.value}" for s, n in counts.items() if n)
