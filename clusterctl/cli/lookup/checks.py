"""The checks that `health` knows, as a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.render.table import Column, render_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.health.check import Check
    from clusterctl.render.console import Terminal

_COLUMNS = (Column(title="CHECK"), Column(title="WORST"), Column(title="WHAT IT SEES TO", shrink=True))


def render_checks(checks: Iterable[Check], terminal: Terminal) -> list[str]:
    """Return a table of checks: name, the worst that each says by itself, what it is for."""
    return render_table(_COLUMNS, [(check.name, check.severity, check.doc) for check in checks], terminal)


def checks_json(checks: Iterable[Check]) -> list[dict[str, Any]]:
    """Return `health --list --json`."""
    fields = ("name", "family", "doc", "source", "threshold", "severity", "remedy")
    return [
        {**{field: getattr(check, field) for field in fields}, "thresholds": dict(check.thresholds)} for check in checks
    ]
