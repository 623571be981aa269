"""For how long nodes have known that they must stop: what their bound counts from. Reads no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

LONGEST_LOOK = 5.0
"""Seconds that count at most between two looks: where this process did not run, nobody was heard."""


class Stopping:
    """Counts the seconds for which each node that was told has been connected: in those it could act and say so.

    Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._looked: float | None = None
        self._killed: float | None = None

    def forget(self) -> None:
        """Begin anew: another attempt is to stop."""
        self._seconds.clear()

    def told(self, node: str) -> None:
        """Take note that a node is told to stop; repeating it changes nothing."""
        self._seconds.setdefault(node, 0.0)

    def kill(self, now: float) -> None:
        """Take note that a person wants the end at once."""
        self._killed = now

    def killed(self, now: float) -> float | None:
        """Return the seconds since a person wanted the end at once; `None` where nobody does."""
        return None if self._killed is None else now - self._killed

    def look(self, connected: Collection[str], now: float) -> dict[str, float]:
        """Return for how long each node has known it, given who is connected and has been since the last look."""
        passed = 0.0 if self._looked is None else min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        for node in self._seconds:
            if node in connected:
                self._seconds[node] += passed
        return dict(self._seconds)
