"""Generates the reference page of all checks: `python -m clusterctl.health.docs > docs/health.md`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from jinja2 import Environment

from clusterctl.health.checks.xid import CATALOGUE, Weight
from clusterctl.health.context import EXPECT_KEYS
from clusterctl.health.gpu_library_errors import MEANINGS, NVML_NAMES, READINGS
from clusterctl.health.model import VENDORS
from clusterctl.health.registry import CHECKS


def render_page() -> str:
    """Return the text of `docs/health.md`."""
    families = groupby(CHECKS.values(), key=lambda check: check.family)
    codes = sorted(CATALOGUE.items())
    weights = (Weight.HARDWARE, Weight.APPLICATION, Weight.NOTE, Weight.UNUSED)
    template = Path(__file__).with_name("reference.md.j2").read_text(encoding="utf-8")
    return (
        Environment(keep_trailing_newline=True)
        .from_string(template)
        .render(
            expect_keys=EXPECT_KEYS,
            families=[(family, list(checks)) for family, checks in families],
            vendors=VENDORS,
            xids=[(weight, [entry for entry in codes if entry[1].weight is weight]) for weight in weights],
            meanings=MEANINGS,
            readings=READINGS,
            nvml_names=NVML_NAMES,
        )
    )


if __name__ == "__main__":
    sys.stdout.write(render_page())
