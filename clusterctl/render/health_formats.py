"""Renders health findings for CI servers (JUnit XML), for Nagios and its relatives, and as a list of bad hosts."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import group_pairs, plural
from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import verdict
from clusterctl.render.console import safe
from clusterctl.render.health_report import WORST_FIRST, HealthReport

NAGIOS_CODES = {Status.PASS: 0, Status.SKIP: 0, Status.WARN: 1, Status.FAIL: 2, Status.UNKNOWN: 3}
"""Exit codes of a plugin by verdict."""
_NAGIOS_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_MOST_PROBLEMS = 5
_JUNIT_COUNTS = {"failures": "failure", "skipped": "skipped"}


def format_health_junit(report: HealthReport, *, strict: bool) -> list[str]:
    """Return JUnit XML, as Jenkins and GitLab read it: a test suite for each node, a test case for each check.

    A FAIL is a failure. UNKNOWN and SKIP are skipped. A WARN is a success with output, because the exit code is 0, too.
    With `strict`, WARN and UNKNOWN are failures.
    """
    root = ElementTree.Element("testsuites", name="clusterctl health")
    groups = [(node.node, list(node.findings)) for node in report.nodes] + [("cluster", list(report.cluster))]
    for name, findings in groups:
        cases = group_pairs(((finding.check, finding.gpu), finding) for finding in findings)
        if cases:
            suite = ElementTree.SubElement(root, "testsuite", name=safe(name))
            for (check, gpu), members in cases.items():
                title = check if gpu is None else f"{check} GPU {gpu}"
                case = ElementTree.SubElement(suite, "testcase", classname=f"health.{safe(name)}", name=title)
                case.set("time", f"{(members[0].duration_ms or 0.0) / 1000:.3f}")
                _add_result(case, members, strict=strict)
            suite.attrib |= {"tests": str(len(cases)), "errors": "0"}
            suite.attrib |= {key: str(len(suite.findall(f"*/{tag}"))) for key, tag in _JUNIT_COUNTS.items()}
    ElementTree.indent(root)
    return ['<?xml version="1.0" encoding="UTF-8"?>', *ElementTree.tostring(root, encoding="unicode").splitlines()]


def _add_result(case: ElementTree.Element, members: list[Finding], *, strict: bool) -> None:
    worst = min((finding.status for finding in members), key=WORST_FIRST.index)
    found = [finding for finding in members if finding.status is worst]
    message = safe(f"{worst.value}: {'; '.join(finding.message for finding in found)}")
    hints = dict.fromkeys(safe(finding.hint) for finding in found if finding.hint)
    if worst is Status.FAIL or (strict and worst in (Status.WARN, Status.UNKNOWN)):
        ElementTree.SubElement(case, "failure", type=worst.value, message=message).text = "\n".join(hints)
    elif worst in (Status.UNKNOWN, Status.SKIP):
        ElementTree.SubElement(case, "skipped", message=message)
    elif worst is Status.WARN:
        ElementTree.SubElement(case, "system-out").text = "\n".join([message, *hints])


def format_health_nagios(report: HealthReport) -> list[str]:
    """Return the status line of a Nagios plugin, with performance data. `NAGIOS_CODES` has the exit codes."""
    word = _NAGIOS_WORDS[NAGIOS_CODES[report.verdict]]
    bad = [finding for finding in report.findings if finding.status in (Status.FAIL, Status.WARN, Status.UNKNOWN)]
    worst = verdict(bad)
    problems = group_pairs(
        ((finding.check, finding.message), finding.node or "cluster") for finding in bad if finding.status is worst
    )
    texts = [f"{fold_hosts(nodes)} {check}: {message}" for (check, message), nodes in problems.items()]
    more = [f"{len(texts) - _MOST_PROBLEMS} more"] if len(texts) > _MOST_PROBLEMS else []
    text = "; ".join([*texts[:_MOST_PROBLEMS], *more]) or f"{plural(len(report.nodes), 'node')} healthy"
    counts = Counter(finding.status for finding in report.findings)
    data = " ".join(f"{status.value.lower()}={counts[status]}" for status in WORST_FIRST)
    # A bar would begin the performance data.
    return [f"HEALTH {word} - {safe(text).replace('|', '/')} | nodes={len(report.nodes)} {data}"]


def format_exclude_list(report: HealthReport) -> str:
    """Return the text of a file with the nodes that failed, one on each line, for `--exclude-file` and for Slurm."""
    bad = [node.node for node in report.nodes if node.verdict is Status.FAIL]
    return "".join(f"{line}\n" for line in ["# nodes that failed `clusterctl health`", *bad])
