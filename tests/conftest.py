"""What the summary of a whole run says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran on lab nodes: a run without a lab must not look like one with it."""
    kinds = {kind: terminalreporter.stats.get(kind, []) for kind in ("passed", "failed", "skipped")}
    counts = {
        kind: sum(report.nodeid.startswith("tests/lab/") and report.when != "teardown" for report in reports)
        for kind, reports in kinds.items()
    }
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none ran"
    terminalreporter.write_line(f"lab tests: {said}")
