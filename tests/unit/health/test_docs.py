"""The reference page is what the registry says today."""

from __future__ import annotations

from pathlib import Path

from clusterctl.health.reference_page import render_page
from clusterctl.health.registry import CHECKS

PAGE = Path(__file__).parents[3] / "docs" / "health.md"


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text() == render_page(), "run `python -m clusterctl.health.reference_page > docs/health.md`"


def test_every_check_documents_its_source_its_threshold_and_its_remedy() -> None:
    for check in CHECKS.values():
        assert all((check.source, check.threshold, check.remedy, check.purpose)), check.name
        assert check.severity in ("FAIL", "WARN"), check.name
        assert (check.node_judge is None) != (check.cluster_judge is None), check.name
        for key in check.thresholds:
            assert f"`{key}`" in check.threshold + check.purpose, f"{check.name} does not explain its threshold `{key}`"
