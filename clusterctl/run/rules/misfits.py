"""How often nodes have said what cannot be: once may be chance, three times is a node that nobody believes. Pure."""

from __future__ import annotations

MOST = 3
WITHIN_SECONDS = 3600.0


class Misfits:
    """Counts for each node of a run what it said that no node says."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}
        self._told: set[tuple[str, str]] = set()

    def again(self, node: str, now: float) -> bool:
        """Take note of one; return whether the node has used up its chances. `now` is monotonic."""
        seen = [moment for moment in self._seen.get(node, []) if now - moment < WITHIN_SECONDS]
        self._seen[node] = [*seen, now][-MOST:]
        return len(seen) + 1 >= MOST

    def is_news(self, node: str, text: str) -> bool:
        """Return whether this was not said of the node before; what varies in it does not make it so for ever."""
        new = (node, text) not in self._told and sum(n == node for n, _ in self._told) < MOST
        if new:
            self._told.add((node, text))
        return new
