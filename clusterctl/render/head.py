"""Whether a head is fit, for people: a line for each thing that it needs, and what to do where it is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import plural
from clusterctl.health.model import Finding, Status
from clusterctl.render.findings import STYLES, sign
from clusterctl.render.terminal.console import CYAN, pad, safe
from clusterctl.render.terminal.wrapping import cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.render.terminal.console import Terminal

_WORDS = {Status.PASS: "ok", Status.WARN: "warn", Status.FAIL: "fail", Status.SKIP: "-", Status.UNKNOWN: "unknown"}


def render_head(findings: Sequence[Finding], verdict: Status, terminal: Terminal) -> list[str]:
    """Return a line for each finding, with its remedy below it, and last whether this head is fit."""
    widest = max((cells(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        word = terminal.style(pad(_WORDS[finding.status], 7), *STYLES[finding.status])
        lines.append(f"{sign(finding.status, terminal)} {pad(finding.check, widest)}  {word}  {safe(finding.message)}")
        lines += [f"    {terminal.style('hint', CYAN)}: {safe(finding.hint)}"] if finding.hint else []
    return [*lines, "", _last_line(findings, verdict, terminal)]


def _last_line(findings: Sequence[Finding], verdict: Status, terminal: Terminal) -> str:
    if verdict is Status.FAIL:
        return f"{terminal.style('FAIL', *STYLES[verdict])}: no run can start from here"
    warnings = sum(finding.status is Status.WARN for finding in findings)
    return terminal.style("OK", *STYLES[verdict]) + (f" with {plural(warnings, 'warning')}" if warnings else "")
