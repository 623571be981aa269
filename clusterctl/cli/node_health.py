"""Checks the nodes of a cluster file, for `health` and `clusterctl.api`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from clusterctl.cli.deep_check import measure_hosts
from clusterctl.cli.node_sessions import open_reachable_sessions
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.health.deep.measurements import Measure, Measurement, add_measurements
from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import verdict
from clusterctl.render.health_report import HealthReport, NodeHealth
from clusterctl.run.nodes.fan_out import Progress
from clusterctl.run.nodes.preflight import judge_facts, probe_nodes
from clusterctl.run.record.health_history import DeepResults, save_deep_results
from clusterctl.run.record.rundir import find_runs_root

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal


DEEP_PREFIX = "deep."
"""The beginning of the names of checks that judge measurements under load."""


def probe_and_judge(
    spec: ClusterSpec,
    hosts: Sequence[HostSpec],
    checks: list[str] | None = None,
    progress: Terminal | None = None,
    *,
    strict: bool = False,
    deep: Literal["quick", "full"] | None = None,
    show: Callable[[str], None] = lambda _: None,
) -> HealthReport:
    """Collect facts from hosts, and judge them. A host that cannot be reached is a finding.

    Args:
        spec: The cluster file.
        hosts: The hosts.
        checks: Names of the checks; `None` for all.
        progress: The terminal that shows which hosts have not answered yet.
        strict: Whether WARN and UNKNOWN count as failures.
        deep: Whether to measure the hosts under load, too. The results are stored.
        show: Receives lines about the progress of the measurement.

    Raises:
        RefusedError: The user has not accepted a command that connects to a host.
    """
    with open_reachable_sessions(spec, hosts, progress=progress) as (sessions, errors):
        step = Progress("health", len(hosts), lambda _: None)
        facts: dict[str, dict[str, Any]] = probe_nodes(spec, sessions, step, compare_code=True)
    facts |= {node: {"unreachable": str(error)} for node, error in errors.items()}
    ordered = {h.name: facts[h.name] for h in hosts}
    measurements = _measure(spec, hosts, ordered, show, full=deep == "full") if deep is not None else []
    findings = judge_facts(spec, ordered, checks)
    if deep is not None:
        judged = tuple(finding for finding in findings if finding.check.startswith(DEEP_PREFIX))
        results = DeepResults(time.time(), tuple(ordered), tuple(measurements), judged)
        save_deep_results(find_runs_root().parent, spec, results)
    return build_health_report(ordered, findings, strict=strict)


def _measure(
    spec: ClusterSpec,
    hosts: Sequence[HostSpec],
    facts: dict[str, dict[str, Any]],
    show: Callable[[str], None],
    *,
    full: bool,
) -> list[Measurement]:
    """Measure the hosts that answered and whose GPUs nobody uses; add the measurements to the facts."""
    used = {f.node: f.message for f in judge_facts(spec, facts, ["gpu.foreign_procs"]) if f.status is Status.FAIL}
    answered = [host for host in hosts if "groups" in facts[host.name]]
    free = [host for host in answered if host.name not in used]
    for node, message in used.items():
        show(f"deep check: {node} is left out: {message}")
    measured = measure_hosts(spec, free, show, full=full) if free else []
    measured += [
        Measurement(node=host.name, measure=Measure.CONTEXT_ERRORS, detail=f"left out: {used[host.name]}")
        for host in answered
        if host.name in used
    ]
    add_measurements({host.name: facts[host.name] for host in answered}, measured)
    return measured


def build_health_report(facts: dict[str, dict[str, Any]], findings: list[Finding], *, strict: bool) -> HealthReport:
    """Return the report of findings about nodes, with the facts of each node."""
    views = []
    for node, facts_of_node in facts.items():
        own = tuple(f for f in findings if f.node == node)
        views.append(NodeHealth(node=node, verdict=verdict(own, strict), findings=own, facts=facts_of_node))
    return HealthReport(
        verdict=verdict(findings, strict), nodes=tuple(views), cluster=tuple(f for f in findings if f.node is None)
    )
