"""Which ranks were placed where: asked for each piece of output, so it must not cost more with every restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Placed = tuple[int, str, tuple[int, ...]]


class Places:
    """An index over `RunState.placed`, which only ever grows."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, str], frozenset[int]] = {}
        self._taken = 0

    def ranks(self, placed: Sequence[Placed], attempt: int, node: str) -> frozenset[int]:
        """Return the ranks that a node has in an attempt; none where it takes no part in it."""
        for number, name, ranks in placed[self._taken :]:
            self._ranks[number, name] = self._ranks.get((number, name), frozenset()).union(ranks)
        self._taken = len(placed)
        return self._ranks.get((attempt, node), frozenset())
