"""Computes the fence: the time after which a node without a controller has surely ended its workers."""

from __future__ import annotations

FENCE_MARGIN_S = 10.0
"""Seconds that are added to a fence, because a node may be late to stop its workers."""


def compute_fence_s(stop_after: float | None, grace: float) -> float | None:
    """Return the seconds from the controller's last frame to the fence; `None` if a node never stops by itself."""
    return None if stop_after is None else stop_after + grace + FENCE_MARGIN_S
