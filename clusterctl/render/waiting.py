"""Says on a terminal for which nodes a command waits, and until when; elsewhere nothing."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from clusterctl.render.ranks import fold_nodes
from clusterctl.render.terminal.console import DIM, fit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from clusterctl.render.terminal.console import Terminal

_SILENT_SECONDS = 1.0
"""What takes no longer needs no word."""

_TICK = 0.5
_CONNECTING = "connecting"


def waiting_line(stages: Mapping[str, str], waited: float, limit: float) -> str:
    """Return for whom is waited, at what, for how long and until when.

    Args:
        stages: What each node is at that is not there yet.
        waited: Seconds until now.
        limit: Seconds after which a node is given up that cannot be connected to.
    """
    alike = set(stages.values())
    what = alike.pop() if len(alike) == 1 else _CONNECTING
    until = f", given up after {limit:g} s" if what == _CONNECTING and waited < limit else ""
    return f"waiting for {fold_nodes(stages)}: {what}, {waited:.0f} s{until}"


class Waiting:
    """Shows for whom is waited, as long as that takes, on the last line.

    Args:
        nodes: Who is to come.
        limit: Seconds after which one is given up that cannot be connected to.
        terminal: Where to; `None` for nowhere.
        stage: What they are at now.
        meanwhile: Called before each time that it is said: whatever it writes stands above.
    """

    def __init__(
        self,
        nodes: Iterable[str],
        limit: float,
        terminal: Terminal | None,
        *,
        stage: str = _CONNECTING,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._stages = dict.fromkeys(nodes, stage)
        self._limit, self._terminal, self._meanwhile = limit, terminal, meanwhile
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def at(self, node: str, stage: str) -> None:
        """Take note of what a node is at; `joined` for one that is there."""
        if stage == "joined":
            self._stages.pop(node, None)
        else:
            self._stages[node] = stage

    def __enter__(self) -> Waiting:
        if self._terminal is not None and self._terminal.live and self._stages:
            self._thread = threading.Thread(target=self._show, args=(self._terminal,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Say no more, and take the line away."""
        self._over.set()
        if self._thread is not None and self._terminal is not None:
            self._thread.join()
            self._terminal.clear()

    def _show(self, terminal: Terminal) -> None:
        began = time.monotonic()
        pause = _SILENT_SECONDS
        while not self._over.wait(pause):
            pause = _TICK
            self._meanwhile()
            stages = dict(self._stages)
            if stages:
                text = waiting_line(stages, time.monotonic() - began, self._limit)
                width = terminal.width
                terminal.transient(terminal.style(fit(text, width and width - 1, terminal.glyphs), DIM))
