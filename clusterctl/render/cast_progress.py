"""Renders the progress of a transfer to many nodes. Pure: the rate is an argument."""

from __future__ import annotations

from collections.abc import Mapping

from clusterctl.formatting import format_duration, format_size
from clusterctl.render.console import Glyphs
from clusterctl.render.top_screen import render_bar

_BAR_COLUMNS = 20
_MAX_LINES = 16


def render_cast_progress(
    done: Mapping[str, int], total: Mapping[str, int], rate_bytes_per_s: float, glyphs: Glyphs
) -> list[str]:
    """Return a line with a bar for each node, the slowest first, and a line with rate and remaining time.

    Args:
        done: The bytes that each node has got.
        total: The bytes that each node lacked.
        rate_bytes_per_s: The present rate of all nodes together.
        glyphs: The characters of the terminal.
    """
    shares = {node: done.get(node, 0) / total[node] for node in total if total[node]}
    slowest = sorted(shares, key=lambda node: (shares[node], node))[:_MAX_LINES]
    width = max(map(len, slowest), default=0)
    lines = [
        f"{node:<{width}}  {render_bar(100 * shares[node], _BAR_COLUMNS, glyphs)} {shares[node]:4.0%}"
        for node in slowest
    ]
    if len(shares) > len(slowest):
        lines.append(f"and {len(shares) - len(slowest)} more nodes, which are ahead")
    missing_bytes = sum(max(0, total[node] - done.get(node, 0)) for node in shares)
    remaining = f", {format_duration(missing_bytes / rate_bytes_per_s)} left" if rate_bytes_per_s > 0 else ""
    return [*lines, f"{format_size(sum(done.values()))} in all, {format_size(rate_bytes_per_s)}/s{remaining}"]
