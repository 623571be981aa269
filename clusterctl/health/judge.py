"""Runs the checks over facts, and computes the verdict of findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from clusterctl.health.check import Check, CheckedCluster, CheckedNode, Facts, run_judge
from clusterctl.health.checks import gpu_facts
from clusterctl.health.findings import Action, Finding, Outcome, Status, skip, unknown
from clusterctl.health.registry import CHECKS
from clusterctl.health.settings import HealthSettings

_WORST_FIRST = (Status.FAIL, Status.WARN, Status.UNKNOWN, Status.PASS)


def judge_all(
    facts_by_node: Mapping[str, Facts], settings: HealthSettings, checks: Iterable[str] | None = None
) -> list[Finding]:
    """Judge each node, then compare the nodes with each other; return all findings."""
    chosen = None if checks is None else list(checks)
    single = [f for node, facts in facts_by_node.items() for f in judge_node(node, facts, settings, chosen)]
    return single + judge_cluster(facts_by_node, settings, chosen)


_CHECKS_WITHOUT_FACTS = {"unreachable": ("net.ssh",), "unprobed": ("net.ssh", "version.interpreter")}
"""Checks that apply to a node without facts, by the key that holds the reason for the missing facts."""


def judge_node(node: str, facts: Facts, settings: HealthSettings, checks: Iterable[str] | None = None) -> list[Finding]:
    """Judge one node by its own facts.

    Args:
        node: Name of the node in `settings.nodes`.
        facts: Facts of the node, with the key `controller` (see `HealthSettings`); `{"unreachable": REASON}` if the
            node has no facts.
        settings: The `health` section of the cluster file.
        checks: Names of the checks to run; `None` for all.

    Returns:
        At least one finding per check. A node without facts has only the findings that give the reason.
    """
    findings: list[Finding] = []
    for check in _select_checks(checks):
        if check.node_judge is None or any(
            check.name not in alone for key, alone in _CHECKS_WITHOUT_FACTS.items() if key in facts
        ):
            continue
        checked = CheckedNode(name=node, facts=facts, settings=settings, check=check)
        took = (
            checked.group().duration_ms
            if check.group
            else gpu_facts.get_library_facts(checked).duration_ms
            if check.gpu
            else None
        )
        findings += [
            check.make_finding(outcome, node=node, duration_ms=took) for outcome in _judge_checked_node(check, checked)
        ]
    return [apply_overrides(finding, settings) for finding in findings]


def judge_cluster(
    facts_by_node: Mapping[str, Facts], settings: HealthSettings, checks: Iterable[str] | None = None
) -> list[Finding]:
    """Compare the nodes that have facts with each other.

    Spares have no vote: the other nodes are compared first, then each spare is compared with the other nodes.

    Returns:
        Findings. `node` is the node that differs, or `None` for a finding about all nodes.
    """
    answered = {node: facts for node, facts in facts_by_node.items() if facts.get("groups")}
    workers = [node for node in answered if node not in settings.spares] or list(answered)
    findings = _compare_nodes({node: answered[node] for node in workers}, settings, checks)
    seen = {(finding.check, finding.node, finding.gpu, finding.message) for finding in findings}
    for spare in (node for node in answered if node not in workers):
        with_it = _compare_nodes({node: answered[node] for node in [*workers, spare]}, settings, checks)
        new = [f for f in with_it if (f.check, f.node, f.gpu, f.message) not in seen and f.status is not Status.PASS]
        findings += [f if f.node else replace(f, node=spare) for f in new if f.node in (None, spare)]
    return [apply_overrides(finding, settings) for finding in findings]


def _compare_nodes(
    facts_by_node: Mapping[str, Facts], settings: HealthSettings, checks: Iterable[str] | None
) -> list[Finding]:
    findings: list[Finding] = []
    for check in _select_checks(checks):
        if check.cluster_judge is None:
            continue
        nodes = tuple(
            CheckedNode(name=name, facts=facts, settings=settings, check=check) for name, facts in facts_by_node.items()
        )
        findings += [
            check.make_finding(outcome, node=None)
            for outcome in _compare(CheckedCluster(nodes=nodes, settings=settings, check=check))
        ]
    return findings


def verdict(findings: Iterable[Finding], strict: bool = False) -> Status:
    """Return the worst status: FAIL, WARN, UNKNOWN, PASS.

    The status is UNKNOWN if a finding is UNKNOWN and none is worse, or if there is no finding. With `strict`, WARN and
    UNKNOWN become FAIL.
    """
    seen = {finding.status for finding in findings}
    worst = next((status for status in _WORST_FIRST if status in seen), Status.UNKNOWN)
    return Status.FAIL if strict and worst in (Status.WARN, Status.UNKNOWN) else worst


def apply_overrides(finding: Finding, settings: HealthSettings) -> Finding:
    """Apply `required`, `severity` and `ignore` of the cluster file to one finding."""
    blind = finding.status is Status.UNKNOWN or finding.needs_root
    if blind and any(fnmatchcase(finding.check, name) for name in settings.required):
        message = f"required, but unknown: {finding.message}"
        finding = replace(finding, status=Status.FAIL, message=message, needs_root=False)
    if finding.status not in (Status.WARN, Status.FAIL, Status.UNKNOWN):
        return finding
    names = [name for name in (finding.override_key, finding.check) if name]
    severity = next((settings.severity[name].lower() for name in names if name in settings.severity), None)
    if severity == "ignore" or any(_matches_ignore_rule(rule, names, finding.node) for rule in settings.ignore):
        message = f"ignored ({finding.status.value}): {finding.message}"
        return replace(finding, status=Status.SKIP, message=message, ignored=True, action=Action.NONE.value)
    if severity and finding.status is not Status.UNKNOWN:
        return replace(finding, status=Status.WARN if severity == "warn" else Status.FAIL)
    return finding


def _matches_ignore_rule(rule: str, names: Sequence[str], node: str | None) -> bool:
    pattern, at, where = rule.partition("@")
    matches = any(fnmatchcase(name, pattern) for name in names)
    return matches and (not at or (node is not None and fnmatchcase(node, where)))


def _select_checks(checks: Iterable[str] | None) -> list[Check]:
    if checks is None:
        return list(CHECKS.values())
    wanted = set(checks)
    return [check for name, check in CHECKS.items() if name in wanted]


def _judge_checked_node(check: Check, node: CheckedNode) -> Sequence[Outcome]:
    """Run a check on one node; the outcome is UNKNOWN if facts are missing."""
    assert check.node_judge is not None
    if check.gpu:
        blocked = gpu_facts.find_skip_reason(node)
        if blocked is not None:
            return [blocked]
    if check.group:
        group = node.group()
        closed = group.status in ("denied", "absent") and check.judge_without_source is not None
        covered = check.judge_without_source(node) if closed and check.judge_without_source else None
        if covered is not None:
            return [covered]
        if group.status != "ok":
            return [unknown(f"not checked: {group.reason or group.status}")]
    judge = (
        check.judges_by_vendor.get(gpu_facts.find_gpu_vendor(node), check.node_judge) if check.gpu else check.node_judge
    )
    return run_judge(judge, node) or [unknown("the node reported nothing about this")]


def _compare(cluster: CheckedCluster) -> Sequence[Outcome]:
    assert cluster.check.cluster_judge is not None
    if not cluster.nodes:
        return [unknown("no node gave facts")]
    if cluster.check.gpu and all(gpu_facts.find_skip_reason(node) is not None for node in cluster.nodes):
        return [skip("no GPUs declared")]
    return run_judge(cluster.check.cluster_judge, cluster)
