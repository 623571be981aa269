"""Judges facts, and sums up findings in a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from clusterctl.health.check import Check, ClusterView, Facts, NodeView, run_judge
from clusterctl.health.checks import gpus
from clusterctl.health.context import Context
from clusterctl.health.model import Action, Finding, Outcome, Status, skip, unknown
from clusterctl.health.registry import CHECKS

_GRAVITY = (Status.FAIL, Status.WARN, Status.UNKNOWN, Status.PASS)


def judge_all(
    facts_by_node: Mapping[str, Facts], context: Context, checks: Iterable[str] | None = None
) -> list[Finding]:
    """Return all findings: those about one node, then those from comparing the nodes with each other."""
    chosen = None if checks is None else list(checks)
    single = [f for node, facts in facts_by_node.items() for f in judge_node(node, facts, context, chosen)]
    return single + judge_cluster(facts_by_node, context, chosen)


_CHECKS_WITHOUT_FACTS = {"unreachable": ("net.ssh",), "unprobed": ("net.ssh", "version.interpreter")}
"""Checks that still apply to a node without facts, by the key that says why it has none."""


def judge_node(node: str, facts: Facts, context: Context, checks: Iterable[str] | None = None) -> list[Finding]:
    """Judge one node by its own facts.

    Args:
        node: Its name in `context.nodes`.
        facts: Its facts, with the key `controller` (see `Context`); `{"unreachable": why}` if it gave none.
        context: The `health` section of the cluster file.
        checks: Names to judge; `None` for all.

    Returns:
        At least one finding per check, or only those that explain why a node gave no facts.
    """
    findings: list[Finding] = []
    for check in _chosen(checks):
        if check.node_judge is None or any(
            check.name not in alone for key, alone in _CHECKS_WITHOUT_FACTS.items() if key in facts
        ):
            continue
        view = NodeView(node=node, facts=facts, context=context, check=check)
        took = view.group().ms if check.group else gpus.read_library(view).ms if check.gpu else None
        findings += [check.finding(outcome, node=node, duration_ms=took) for outcome in _judge(check, view)]
    return [apply_overrides(finding, context) for finding in findings]


def judge_cluster(
    facts_by_node: Mapping[str, Facts], context: Context, checks: Iterable[str] | None = None
) -> list[Finding]:
    """Compare the nodes with each other, except nodes without facts (their `net.ssh` has failed).

    Spares have no vote: the workers are judged first, then each spare is compared with them.

    Returns:
        Findings; `node` names the odd one, and is `None` for a finding about all nodes.
    """
    answered = {node: facts for node, facts in facts_by_node.items() if facts.get("groups")}
    workers = [node for node in answered if node not in context.spares] or list(answered)
    findings = _compare_nodes({node: answered[node] for node in workers}, context, checks)
    seen = {(finding.check, finding.node, finding.gpu, finding.message) for finding in findings}
    for spare in (node for node in answered if node not in workers):
        with_it = _compare_nodes({node: answered[node] for node in [*workers, spare]}, context, checks)
        new = [f for f in with_it if (f.check, f.node, f.gpu, f.message) not in seen and f.status is not Status.PASS]
        findings += [f if f.node else replace(f, node=spare) for f in new if f.node in (None, spare)]
    return [apply_overrides(finding, context) for finding in findings]


def _compare_nodes(facts_by_node: Mapping[str, Facts], context: Context, checks: Iterable[str] | None) -> list[Finding]:
    findings: list[Finding] = []
    for check in _chosen(checks):
        if check.cluster_judge is None:
            continue
        views = tuple(
            NodeView(node=node, facts=facts, context=context, check=check) for node, facts in facts_by_node.items()
        )
        findings += [check.finding(outcome, node=None) for outcome in _compare(check, views, context)]
    return findings


def verdict(findings: Iterable[Finding], strict: bool = False) -> Status:
    """Return the worst status: FAIL, WARN, UNKNOWN, PASS.

    UNKNOWN is never a pass: the verdict is UNKNOWN if nothing is wrong but something could not be checked, or if there
        is
    no finding at all. With `strict`, WARN and UNKNOWN become FAIL.
    """
    seen = {finding.status for finding in findings}
    worst = next((status for status in _GRAVITY if status in seen), Status.UNKNOWN)
    return Status.FAIL if strict and worst in (Status.WARN, Status.UNKNOWN) else worst


def apply_overrides(finding: Finding, context: Context) -> Finding:
    """Apply `required`, `severity` and `ignore` of the cluster file to one finding."""
    blind = finding.status is Status.UNKNOWN or finding.needs_root
    if blind and any(fnmatchcase(finding.check, name) for name in context.required):
        message = f"required, but could not look: {finding.message}"
        finding = replace(finding, status=Status.FAIL, message=message, needs_root=False)
    if finding.status not in (Status.WARN, Status.FAIL, Status.UNKNOWN):
        return finding
    names = [name for name in (finding.key, finding.check) if name]
    severity = next((context.severity[name].lower() for name in names if name in context.severity), None)
    if severity == "ignore" or any(_ignores(rule, names, finding.node) for rule in context.ignore):
        message = f"ignored ({finding.status.value}): {finding.message}"
        return replace(finding, status=Status.SKIP, message=message, ignored=True, action=Action.NONE.value)
    if severity and finding.status is not Status.UNKNOWN:
        return replace(finding, status=Status.WARN if severity == "warn" else Status.FAIL)
    return finding


def _ignores(rule: str, names: Sequence[str], node: str | None) -> bool:
    pattern, at, where = rule.partition("@")
    matches = any(fnmatchcase(name, pattern) for name in names)
    return matches and (not at or (node is not None and fnmatchcase(node, where)))


def _chosen(checks: Iterable[str] | None) -> list[Check]:
    if checks is None:
        return list(CHECKS.values())
    wanted = set(checks)
    return [check for name, check in CHECKS.items() if name in wanted]


def _judge(check: Check, view: NodeView) -> Sequence[Outcome]:
    """Judge one node; UNKNOWN if the facts of a check are missing."""
    assert check.node_judge is not None
    if check.gpu:
        blocked = gpus.find_skip_reason(view)
        if blocked is not None:
            return [blocked]
    if check.group:
        group = view.group()
        closed = group.status in ("denied", "absent") and check.witness is not None
        covered = check.witness(view) if closed and check.witness else None
        if covered is not None:
            return [covered]
        if group.status != "ok":
            return [unknown(f"could not look: {group.reason or group.status}")]
    judge = check.by_vendor.get(gpus.find_vendor(view), check.node_judge) if check.gpu else check.node_judge
    return run_judge(judge, view) or [unknown("the facts say nothing about it")]


def _compare(check: Check, views: tuple[NodeView, ...], context: Context) -> Sequence[Outcome]:
    assert check.cluster_judge is not None
    if not views:
        return [unknown("no node gave facts")]
    if check.gpu and all(gpus.find_skip_reason(view) is not None for view in views):
        return [skip("no GPUs declared")]
    return run_judge(check.cluster_judge, ClusterView(views=views, context=context, check=check))
