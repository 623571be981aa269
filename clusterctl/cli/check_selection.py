"""The checks that `--only` and `--skip` select, and their list."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from clusterctl.health.check import Check
from clusterctl.health.registry import CHECKS
from clusterctl.render.table import Column, render_table
from clusterctl.suggestion import find_similar

if TYPE_CHECKING:
    from clusterctl.render.console import Console, Terminal

_CHECK_COLUMNS = (Column(title="CHECK"), Column(title="WORST"), Column(title="WHAT IT CHECKS", shrink=True))


def print_checks(names: list[str] | None, console: Console, *, as_json: bool) -> int:
    """Print checks; return the exit code."""
    checks = [check for name, check in CHECKS.items() if names is None or name in names]
    if as_json:
        console.write_stdout_json(checks_to_json(checks))
    else:
        console.write_stdout(*render_checks(checks, console.out))
    return 0


def render_checks(checks: Iterable[Check], terminal: Terminal) -> list[str]:
    """Return a table of checks: name, default severity, description."""
    return render_table(_CHECK_COLUMNS, [(check.name, check.severity, check.purpose) for check in checks], terminal)


def checks_to_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Return the output of `health --list --json`."""
    attributes = {"doc": "purpose"}
    fields = ("name", "family", "doc", "source", "threshold", "severity", "remedy")
    values = [{field: getattr(check, attributes.get(field, field)) for field in fields} for check in checks]
    return [{**entry, "thresholds": dict(check.thresholds)} for entry, check in zip(values, checks, strict=True)]


def select_checks(only: str | None, skip: str | None) -> list[str] | None:
    """Return the names of the selected checks, or `None` for all checks.

    Raises:
        click.BadParameter: There is no check of this name.
    """
    if only is None and skip is None:
        return None
    chosen = _match_checks(only, "--only") if only else set(CHECKS)
    skipped = _match_checks(skip, "--skip") if skip else set()
    return [name for name in CHECKS if name in chosen - skipped]


def _match_checks(text: str, option: str) -> set[str]:
    """Return the checks that match one of the patterns.

    Raises:
        click.BadParameter: No check matches a pattern.
    """
    names: set[str] = set()
    for pattern in text.split(","):
        matching = fnmatch.filter(CHECKS, pattern.strip())
        if not matching:
            close = find_similar(pattern.strip(), CHECKS)
            then = f"did you mean `{close}`?" if close else "`clusterctl health --list` shows all"
            raise click.BadParameter(f"no check `{pattern}`; {then}", param_hint=option)
        names |= set(matching)
    return names
