"""Renders the goodput of a run as a line, and as JSON."""

from __future__ import annotations

from typing import Any

from clusterctl.formatting import format_duration, plural
from clusterctl.render.console import Glyphs
from clusterctl.run.rules.goodput import PARTS, Goodput


def describe_goodput(goodput: Goodput | None, glyphs: Glyphs) -> list[str]:
    """Return a line with the goodput and the time that was not productive; no line if there is no goodput yet."""
    if goodput is None or goodput.ratio is None:
        return []
    lost = "repeated work" if goodput.lost_steps is None else f"{plural(goodput.lost_steps, 'step')} repeated"
    names = {
        "start": "start",
        "restart": plural(goodput.restarts, "restart"),
        "stalled": plural(goodput.stalls, "stall"),
        "lost": lost,
        "stopping": "stopping",
    }
    seconds = {part: getattr(goodput, f"{part}_s") for part in names}
    parts = [f"{name} {format_duration(seconds[part])}" for part, name in names.items() if seconds[part] >= 0.5]
    if goodput.is_upper_bound:
        parts.append("first step unknown" if goodput.is_lost_known else "repeated work unknown")
    bound = "at most " if goodput.is_upper_bound else ""
    whole = f"goodput {bound}{goodput.ratio:.1%} of {format_duration(goodput.wall_s)}"
    return [f" {glyphs.dot} ".join([whole, *parts])]


def goodput_json(goodput: Goodput | None) -> dict[str, Any] | None:
    """Return the field `goodput` of `status --json`."""
    if goodput is None:
        return None
    seconds = {f"{part}_s": round(getattr(goodput, f"{part}_s"), 3) for part in PARTS}
    ratio = None if goodput.ratio is None else round(goodput.ratio, 4)
    counts = {key: getattr(goodput, key) for key in ("is_upper_bound", "has_steps", "restarts", "stalls", "lost_steps")}
    return {"ratio": ratio, "wall_s": round(goodput.wall_s, 3), **seconds, **counts}
