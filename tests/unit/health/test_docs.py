"""The reference page is what the registry says today."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.health.check import Check
from clusterctl.health.docs import page
from clusterctl.health.registry import CHECKS

PAGE = Path(__file__).parents[3] / "docs" / "health.md"


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text() == page(), "run `python -m clusterctl.health.docs > docs/health.md`"


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.name)
def test_every_check_tells_what_it_looks_at_when_it_is_content_and_what_to_do(check: Check) -> None:
    assert all((check.source, check.threshold, check.remedy, check.doc))
    assert check.severity in ("FAIL", "WARN")
    assert (check.node_judge is None) != (check.cluster_judge is None)
    for key in check.thresholds:
        assert f"`{key}`" in check.threshold + check.doc, f"the threshold `{key}` is not explained"
