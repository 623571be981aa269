"""Which ranks the others wait for again and again: by the shares of time alone."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LONG_S = 60.0
"""What takes less long is nobody's question."""
_APART = 0.25
"""By so much less of its time than others does a slow rank wait for its peers: no chance in three times 13 looks."""
_SHARE = 1 / 3


def slow_among(waits: Mapping[int, Sequence[float] | None]) -> tuple[int, ...]:
    """Return the ranks that others wait for again and again: they wait much less for their peers than most do.

    Each part of the time must say so: one pause, however long it was, is not again and again. Where nobody waits much,
    or all alike, nobody is slow.

    Args:
        waits: By rank, the share of each part; `None` where it was not counted.
    """
    counted = {rank: each for rank, each in waits.items() if each is not None}
    if len(waits) < 2 or len(counted) < len(waits):
        return ()
    parts = [_apart(dict(zip(counted, part, strict=True))) for part in zip(*counted.values(), strict=True)]
    found = set.intersection(*parts)
    return tuple(sorted(found)) if 2 * len(found) <= len(waits) else ()


def _apart(shares: Mapping[int, float]) -> set[int]:
    usual = median(sorted(shares.values(), reverse=True)[: max(1, len(shares) // 2)])
    return {rank for rank, share in shares.items() if usual - share >= _APART and share <= _SHARE * usual}
