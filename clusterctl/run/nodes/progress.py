"""How far a start has come, as those who wait for it are told, and its end by a person's wish."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.errors import ClusterctlError
from clusterctl.run.rules import events

if TYPE_CHECKING:
    from collections.abc import Callable


_REPORT_EVERY = 0.1


class CancelledError(ClusterctlError):
    """A person ended the run while it was being started."""


@dataclass
class Progress:
    """Posts how far a step is: at most every 100 ms while it goes on, and once when it is over."""

    name: str
    total: int
    post: Callable[[events.ControllerEvent], None]
    began: float = field(default_factory=time.monotonic)
    waiting: dict[str, tuple[str, float]] = field(default_factory=dict)
    done: int = 0
    _last: float = 0.0
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def at(self, node: str, what: str) -> None:
        """Say what a node is waited for."""
        with self._guard:
            self.waiting[node] = (what, time.monotonic())
            self._report()

    def through(self, node: str, count: int = 1) -> None:
        """Count a node as done."""
        with self._guard:
            self.waiting.pop(node, None)
            self.done += count
            self._report()

    def end(self, detail: str = "", *, failed: bool = False) -> None:
        """Close the step."""
        with self._guard:
            self._post(detail=detail, ended=True, failed=failed)

    def _report(self) -> None:
        if time.monotonic() - self._last >= _REPORT_EVERY:
            self._post()

    def _post(self, *, detail: str = "", ended: bool = False, failed: bool = False) -> None:
        self._last = time.monotonic()
        slowest = sorted(self.waiting.items(), key=lambda item: item[1][1])[:5]
        self.post(
            events.Phase(
                name=self.name,
                done=self.done,
                total=self.total,
                waiting=[[node, what] for node, (what, _) in slowest],
                detail=detail,
                seconds=self._last - self.began,
                ended=ended,
                failed=failed,
            )
        )
