"""How far a start has come, as those who wait for it are told, and its end by a person's wish."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.errors import ClusterctlError
from clusterctl.run.rules import controller_events

if TYPE_CHECKING:
    from collections.abc import Callable


_REPORT_EVERY = 0.1
_TELL_EVERY = 1.0


class CancelledError(ClusterctlError):
    """A person ended the run while it was being started."""


@dataclass
class Progress:
    """Posts how far a step is: at most every 100 ms while it goes on, and once when it is over.

    At the end it tells how long each node took, and with what most of that: what was waited for last counts until then.
    """

    name: str
    total: int
    post: Callable[[controller_events.ControllerEvent], None]
    began: float = field(default_factory=time.monotonic)
    waiting: dict[str, tuple[str, float]] = field(default_factory=dict)
    done: int = 0
    detail: str = ""
    nodes: dict[str, float] = field(default_factory=dict)
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    _last: float = 0.0
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def at(self, node: str, what: str) -> None:
        """Say what a node is waited for."""
        with self._guard:
            self._leave(node)
            self.waiting[node] = (what, time.monotonic())
            self._report()

    def tell(self, detail: str) -> None:
        """Say how far the step as a whole is; once a second, as it may go on for an hour."""
        with self._guard:
            self.detail = detail
            if time.monotonic() - self._last >= _TELL_EVERY:
                self._post(detail=detail)

    def through(self, node: str, count: int = 1) -> None:
        """Count a node as done."""
        with self._guard:
            self._leave(node)
            self.nodes[node] = time.monotonic() - self.began
            self.done += count
            self._report()

    def end(self, detail: str = "", *, failed: bool = False) -> None:
        """Close the step."""
        with self._guard:
            self._post(detail=detail, ended=True, failed=failed)

    def _leave(self, node: str) -> None:
        what, since = self.waiting.pop(node, ("", 0.0))
        if what:
            spent = self.parts.setdefault(node, {})
            spent[what] = spent.get(what, 0.0) + time.monotonic() - since

    def _longest(self) -> dict[str, tuple[str, float]]:
        """Return what each node was waited for longest, where that was not one thing all the time."""
        longest = {n: max(spent.items(), key=lambda part: part[1]) for n, spent in self.parts.items() if len(spent) > 1}
        return {node: (what, round(seconds, 3)) for node, (what, seconds) in longest.items()}

    def _report(self) -> None:
        if time.monotonic() - self._last >= _REPORT_EVERY:
            self._post(detail=self.detail)

    def _post(self, *, detail: str = "", ended: bool = False, failed: bool = False) -> None:
        self._last = time.monotonic()
        slowest = sorted(self.waiting.items(), key=lambda item: item[1][1])[:5]
        self.post(
            controller_events.Phase(
                name=self.name,
                done=self.done,
                total=self.total,
                waiting=[[node, what] for node, (what, _) in slowest],
                detail=detail,
                seconds=self._last - self.began,
                ended=ended,
                failed=failed,
                nodes={node: round(seconds, 3) for node, seconds in self.nodes.items()} if ended else {},
                parts=self._longest() if ended else {},
            )
        )
