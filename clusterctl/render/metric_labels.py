"""Renders the labels of a metric in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Mapping


def render_labels(labels: Mapping[str, str]) -> str:
    """Return labels in braces, with escaped values."""
    escaped = (
        (key, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for key, value in labels.items()
    )
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"
