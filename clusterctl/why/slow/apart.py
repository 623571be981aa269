"""Which ranks the others wait for again and again: by the shares of time alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.middle import median

if TYPE_CHECKING:
    from collections.abc import Mapping

LONG_S = 60.0
"""What takes less long is nobody's question."""
_APART = 0.25
"""By so much less of its time than others does a slow rank wait for its peers: no chance in both halves of 40 looks."""
_SHARE = 1 / 3


def slow_among(waits: Mapping[int, tuple[float, float] | None]) -> tuple[int, ...]:
    """Return the ranks that others wait for again and again: they wait much less for their peers than most do.

    Both halves of the time must say so. Where nobody waits much, or all alike, nobody is slow.

    Args:
        waits: By rank, the share of each half; `None` where it was not counted.
    """
    if len(waits) < 2 or any(each is None for each in waits.values()):
        return ()
    halves = [_apart({rank: each[half] for rank, each in waits.items() if each}) for half in (0, 1)]
    found = halves[0] & halves[1]
    return tuple(sorted(found)) if 2 * len(found) <= len(waits) else ()


def _apart(shares: Mapping[int, float]) -> set[int]:
    usual = median(sorted(shares.values(), reverse=True)[: max(1, len(shares) // 2)])
    return {rank for rank, share in shares.items() if usual - share >= _APART and share <= _SHARE * usual}
