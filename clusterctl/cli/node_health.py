"""Checks the nodes of a cluster file, for `health` and `clusterctl.api`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clusterctl.cli.node_sessions import open_reachable_sessions
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.health.findings import Finding
from clusterctl.health.judge import verdict
from clusterctl.render.health_report import HealthReport, NodeHealth
from clusterctl.run.nodes.fan_out import Progress
from clusterctl.run.nodes.preflight import judge_facts, probe_nodes

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal


def probe_and_judge(
    spec: ClusterSpec,
    hosts: Sequence[HostSpec],
    checks: list[str] | None = None,
    progress: Terminal | None = None,
    *,
    strict: bool = False,
) -> HealthReport:
    """Collect facts from hosts, and judge them. A host that cannot be reached is a finding.

    Raises:
        RefusedError: The user has not accepted a command that connects to a host.
    """
    with open_reachable_sessions(spec, hosts, progress=progress) as (sessions, errors):
        step = Progress("health", len(hosts), lambda _: None)
        facts: dict[str, dict[str, Any]] = probe_nodes(spec, sessions, step, compare_code=True)
    facts |= {node: {"unreachable": str(error)} for node, error in errors.items()}
    ordered = {h.name: facts[h.name] for h in hosts}
    return build_health_report(ordered, judge_facts(spec, ordered, checks), strict=strict)


def build_health_report(facts: dict[str, dict[str, Any]], findings: list[Finding], *, strict: bool) -> HealthReport:
    """Return the report of findings about nodes, with the facts of each node."""
    views = []
    for node, facts_of_node in facts.items():
        own = tuple(f for f in findings if f.node == node)
        views.append(NodeHealth(node=node, verdict=verdict(own, strict), findings=own, facts=facts_of_node))
    return HealthReport(
        verdict=verdict(findings, strict), nodes=tuple(views), cluster=tuple(f for f in findings if f.node is None)
    )
