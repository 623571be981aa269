"""Renders health findings for people (nodes, then problems with remedies) and programs (JSON, NDJSON, Prometheus)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import fold_ranks, group_pairs, plural
from clusterctl.health.findings import Finding, Status, finding_from_json
from clusterctl.render.console import BOLD, CYAN, DIM, GREEN, RED, YELLOW, Terminal, fit, pad, safe
from clusterctl.render.line_wrapping import count_columns
from clusterctl.render.metric_labels import render_labels
from clusterctl.render.terminal_sanitizer import json_line

WORST_FIRST = (Status.FAIL, Status.WARN, Status.UNKNOWN, Status.PASS, Status.SKIP)
STYLES = {
    Status.FAIL: (RED, BOLD),
    Status.WARN: (YELLOW,),
    Status.UNKNOWN: (YELLOW,),
    Status.PASS: (GREEN,),
    Status.SKIP: (DIM,),
}
_MOST_CHECKS = 3
_MOST_REASONS = 4
_LABEL = re.compile(r"^GPU \d+(?: \([0-9a-fA-F:.]+\))?: ")
"""Matches the GPU at the beginning of a message, which reports for people name in another place."""
_ADVERSE = (Status.FAIL, Status.WARN, Status.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """The health findings about one node."""

    node: str
    verdict: Status
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""
    """The hardware of the node in a few words, such as `8x H100 80GB · driver 580.65`."""
    offence: str | None = None
    """How often the machine failed recently, if it is a repeat offender."""
    slower: tuple[str, ...] = ()
    """Measurements below those of the same machine in the last month, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """The result of `health`. Nodes are in the order of node rank; `cluster` has the findings about several nodes."""

    verdict: Status
    nodes: tuple[NodeHealth, ...]
    cluster: tuple[Finding, ...] = ()

    @property
    def findings(self) -> list[Finding]:
        """All findings: the findings of nodes, then the findings of the cluster."""
        return [finding for node in self.nodes for finding in node.findings] + list(self.cluster)


# --- for people


def render_health(report: HealthReport, terminal: Terminal, *, verbose: bool = False) -> list[str]:
    """Return a line for each group of nodes with the same result, then the problems.

    Args:
        report: The findings.
        terminal: The terminal that will show the lines.
        verbose: Whether to show also passed checks, and the reasons of skipped checks.
    """
    lines = _node_lines(report.nodes, terminal)
    lines += [
        f"{status_sign(Status.WARN, terminal)} {safe(fold_hosts(names))}: {text}"
        for text, names in group_pairs((text, n.node) for n in report.nodes for text in (n.offence, *n.slower)).items()
        if text
    ]
    groups = [
        *render_findings_by_check(report.findings, terminal, statuses=_ADVERSE),
        *_list_root_checks(report.findings, terminal),
    ]
    if verbose:
        groups += [*_list_passed(report.findings, terminal), *_describe_skipped(report.findings, terminal)]
    if groups:
        lines += ["", *groups]
    return [*lines, "", _verdict_line(report, terminal)]


def render_findings_by_check(
    findings: Iterable[Finding | Mapping[str, Any]],
    terminal: Terminal,
    *,
    statuses: Sequence[Status] = (Status.FAIL, Status.WARN),
) -> list[str]:
    """Return findings grouped by check, worst first. Equal messages of several nodes and equal remedies appear once.

    Checks with an unknown result for the same reason on the same nodes form one group: if a GPU is lost, all checks of
    this GPU give the same message.
    """
    every = (entry if isinstance(entry, Finding) else finding_from_json(entry) for entry in findings)
    groups = group_pairs(((f.status, f.check), f) for f in every if f.status in statuses)
    bodies: dict[tuple[Status, tuple[str, ...]], list[str]] = {}
    for (status, check), members in sorted(groups.items(), key=lambda item: WORST_FIRST.index(item[0][0])):
        body = tuple(_body(members, terminal))
        bodies.setdefault((status, body if status is Status.UNKNOWN else (check, *body)), []).append(check)
    lines: list[str] = []
    for (status, body), checks in bodies.items():
        lines.append(
            f"{status_sign(status, terminal)} {terminal.style(status.value, *STYLES[status])} {_join_checks(checks)}"
        )
        lines += body if status is Status.UNKNOWN else body[1:]
    return lines


def _list_root_checks(findings: Sequence[Finding], terminal: Terminal) -> list[str]:
    """Return a line for the checks that need root, grouped by nodes with the same checks."""
    by_node = group_pairs(((f.node or "", f.hint), f.check) for f in findings if f.needs_root and not f.ignored)
    alike = group_pairs(((tuple(dict.fromkeys(names)), hint), node) for (node, hint), names in by_node.items())
    lines = []
    for (checks, hint), nodes in alike.items():
        place = terminal.style(fold_hosts(nodes), BOLD)
        lines.append(f"{status_sign(Status.SKIP, terminal)} needs root {place}: {_join_checks(checks)}")
        lines += [f"    {terminal.style('hint', CYAN)}: {safe(hint)}"] if hint else []
    return lines


def _join_checks(checks: Sequence[str]) -> str:
    left = len(checks) - _MOST_CHECKS
    return ", ".join(checks) if left <= 1 else f"{', '.join(checks[:_MOST_CHECKS])} and {left} more checks"


def _body(findings: Sequence[Finding], terminal: Terminal) -> list[str]:
    lines = []
    nodes = group_pairs(((message, tuple(gpus)), node) for (node, message), gpus in _by_message(findings).items())
    for (message, indices), names in nodes.items():
        where = fold_hosts(name for name in names if name) or "cluster"
        which = f" GPU {fold_ranks(indices)}" if indices else ""
        lines.append(f"    {terminal.style(where + which, BOLD)}: {safe(message)}")
    hints = dict.fromkeys(finding.hint for finding in findings if finding.hint)
    return lines + [f"    {terminal.style('hint', CYAN)}: {safe(hint)}" for hint in hints]


def _by_message(findings: Sequence[Finding]) -> dict[tuple[str, str], list[int]]:
    """Return the GPUs by node and message. The report names the GPU before each message, so messages omit the GPU."""
    joined: dict[tuple[str, str], list[int]] = {}
    for finding in findings:
        message = finding.message if finding.gpu is None else _LABEL.sub("", finding.message)
        gpus = joined.setdefault((finding.node or "", message), [])
        if finding.gpu is not None:
            gpus.append(finding.gpu)
    return joined


def _list_passed(findings: Sequence[Finding], terminal: Terminal) -> list[str]:
    """Return a line for each message of each check that passed."""
    by_check = group_pairs((finding.check, finding) for finding in findings if finding.status is Status.PASS)
    widest = max(map(len, by_check), default=0)
    mark = status_sign(Status.PASS, terminal)
    return [
        f"{mark} {pad(check, widest)}  {line.strip()}"
        for check, members in by_check.items()
        for line in _body(members, terminal)
    ]


def _describe_skipped(findings: Sequence[Finding], terminal: Terminal) -> list[str]:
    """Return a line with the number of skipped checks and their reasons, most frequent first; no line for 0 checks."""
    reasons: dict[str, set[str]] = {}
    for finding in findings:
        if finding.status is Status.SKIP and not finding.needs_root:
            reasons.setdefault(finding.message, set()).add(finding.check)
    if not reasons:
        return []
    told = sorted(reasons.items(), key=lambda reason: -len(reason[1]))
    words = ", ".join(f"{safe(message)} ({len(checks)})" for message, checks in told[:_MOST_REASONS])
    if len(told) > _MOST_REASONS:
        words += f", for other reasons ({sum(len(checks) for _, checks in told[_MOST_REASONS:])})"
    many = plural(len(set().union(*reasons.values())), "check")
    return [f"{status_sign(Status.SKIP, terminal)} {many} skipped: {words}"]


def _node_lines(nodes: Sequence[NodeHealth], terminal: Terminal) -> list[str]:
    """Return a line for each group of nodes with the same result, in the order of their first nodes."""
    alike = group_pairs(((node.verdict, _describe_node(node)), node.node) for node in nodes)
    names = {key: safe(fold_hosts(members)) for key, members in alike.items()}
    widest = max(map(count_columns, names.values()), default=0)
    if terminal.width is not None:
        widest = min(widest, max(20, terminal.width // 3))
    return [_node_line(names[verdict, told], verdict, told, widest, terminal) for verdict, told in alike]


def _describe_node(node: NodeHealth) -> tuple[str, ...]:
    counts = Counter(finding.status for finding in node.findings)
    parts = [node.summary] if node.summary else []
    parts += [f"{counts[status]} {status.value.lower()}" for status in _ADVERSE if counts[status]]
    if counts[Status.PASS]:
        parts.append(f"{counts[Status.PASS]} passed")
    worst = next((status for status in _ADVERSE if counts[status]), None)
    if worst is not None:
        parts.append(", ".join(dict.fromkeys(f.check for f in node.findings if f.status is worst)))
    return tuple(parts)


def _node_line(name: str, verdict: Status, parts: Sequence[str], widest: int, terminal: Terminal) -> str:
    text = fit(
        f" {terminal.glyphs.dot} ".join(safe(part) for part in parts),
        None if terminal.width is None else max(20, terminal.width - widest - 14),
        terminal.glyphs,
    )
    word = terminal.style(pad(verdict.value, 7), *STYLES[verdict])
    return (
        f"{status_sign(verdict, terminal)} {pad(fit(name, widest, terminal.glyphs), widest)}  {word}  {text}".rstrip()
    )


def _verdict_line(report: HealthReport, terminal: Terminal) -> str:
    counts = Counter(node.verdict for node in report.nodes)
    parts = [f"{counts[status]} {status.value}" for status in WORST_FIRST if counts[status]]
    verdict = terminal.style(report.verdict.value, *STYLES[report.verdict])
    return f"{verdict}: {plural(len(report.nodes), 'node')}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")


def status_sign(status: Status, terminal: Terminal) -> str:
    """Return the sign for a status."""
    glyphs = terminal.glyphs
    glyph = {Status.FAIL: glyphs.fail, Status.PASS: glyphs.ok, Status.SKIP: glyphs.dot}.get(status, glyphs.warn)
    return terminal.style(pad(glyph, count_columns(glyphs.ok)), *STYLES[status])


# --- for machines


def format_health_json(report: HealthReport) -> dict[str, Any]:
    """Return the output of `health --json`."""
    return {
        "verdict": report.verdict.value,
        "nodes": [
            {
                "node": node.node,
                "verdict": node.verdict.value,
                "offence": node.offence,
                "slower": list(node.slower),
                "findings": [finding.to_json() for finding in node.findings],
                "facts": dict(node.facts),
            }
            for node in report.nodes
        ],
        "cluster": [finding.to_json() for finding in report.cluster],
    }


def format_health_ndjson(report: HealthReport) -> list[str]:
    """Return a line of JSON for each finding."""
    return [json_line(finding.to_json()) for finding in report.findings]


def format_health_prometheus(report: HealthReport) -> list[str]:
    """Return Prometheus metrics: the value 1 for the present status of each check and the verdict of each node."""
    lines = [
        "# HELP clusterctl_health_finding Result of a check of a node or a GPU; 1 for the present status.",
        "# TYPE clusterctl_health_finding gauge",
    ]
    samples: set[str] = set()
    for finding in report.findings:
        labels = {"node": finding.node or "", "check": finding.check, "status": finding.status.value}
        if finding.gpu is not None:
            labels["gpu"] = str(finding.gpu)
        sample = f"clusterctl_health_finding{render_labels(labels)} 1"
        if sample not in samples:  # Findings of one check may differ in their messages only.
            samples.add(sample)
            lines.append(sample)
    lines += [
        "# HELP clusterctl_health_verdict Verdict on a node; 1 for the present status.",
        "# TYPE clusterctl_health_verdict gauge",
    ]
    for node in report.nodes:
        lines.append(f"clusterctl_health_verdict{render_labels({'node': node.node, 'status': node.verdict.value})} 1")
    return lines


_WORDS = {Status.PASS: "ok", Status.WARN: "warn", Status.FAIL: "fail", Status.SKIP: "-", Status.UNKNOWN: "unknown"}


def render_head_checks(findings: Sequence[Finding], verdict: Status, terminal: Terminal) -> list[str]:
    """Return a line for each finding about the head, with its remedy. A last line says whether runs can start."""
    widest = max((count_columns(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        word = terminal.style(pad(_WORDS[finding.status], 7), *STYLES[finding.status])
        lines.append(
            f"{status_sign(finding.status, terminal)} {pad(finding.check, widest)}  {word}  {safe(finding.message)}"
        )
        lines += [f"    {terminal.style('hint', CYAN)}: {safe(finding.hint)}"] if finding.hint else []
    return [*lines, "", _last_line(findings, verdict, terminal)]


def _last_line(findings: Sequence[Finding], verdict: Status, terminal: Terminal) -> str:
    if verdict is Status.FAIL:
        return f"{terminal.style('FAIL', *STYLES[verdict])}: no run can start from here"
    warnings = sum(finding.status is Status.WARN for finding in findings)
    return terminal.style("OK", *STYLES[verdict]) + (f" with {plural(warnings, 'warning')}" if warnings else "")
