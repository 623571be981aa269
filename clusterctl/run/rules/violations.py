"""How often nodes have said what cannot be: once may be chance, three times is a node that nobody believes. Pure."""

from __future__ import annotations

MAX_VIOLATIONS = 3
VIOLATION_WINDOW_S = 3600.0


class ViolationCounter:
    """Counts for each node of a run what it said that no node says."""

    def __init__(self) -> None:
        self._moments: dict[str, list[float]] = {}
        self._texts: set[tuple[str, str]] = set()

    def add(self, node: str, now: float) -> bool:
        """Take note of one; return whether the node has used up its chances. `now` is monotonic."""
        moments = [moment for moment in self._moments.get(node, []) if now - moment < VIOLATION_WINDOW_S]
        self._moments[node] = [*moments, now][-MAX_VIOLATIONS:]
        return len(moments) + 1 >= MAX_VIOLATIONS

    def is_new(self, node: str, text: str) -> bool:
        """Return whether this was not said of the node before; what varies in it does not make it so for ever."""
        new = (node, text) not in self._texts and sum(n == node for n, _ in self._texts) < MAX_VIOLATIONS
        if new:
            self._texts.add((node, text))
        return new
