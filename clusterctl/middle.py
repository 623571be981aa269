"""The middle of some values: what `statistics` says, whose import takes longer than most screens have to count."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def median(values: Iterable[float]) -> float:
    """Return the middle value, or the mean of the two in the middle; there has to be a value."""
    known = sorted(values)
    half = len(known) // 2
    return known[half] if len(known) % 2 else (known[half - 1] + known[half]) / 2


def median_low(values: Iterable[int]) -> int:
    """Return the middle value, or the lower of the two in the middle; there has to be a value."""
    known = sorted(values)
    return known[(len(known) - 1) // 2]
