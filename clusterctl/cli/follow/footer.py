"""Keeps the last line of the live view on the screen, where a person sits before it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from clusterctl.render.console import DIM, fit
from clusterctl.render.progress import Pace, Watched, last_line
from clusterctl.run.record.sample_files import read_latest_activity

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState

_EVERY = 1.0
_LOOK_EVERY = 3.0
_BAR_STAYS = 3.0


class Footer:
    """Draws the line once a second; what is written in the meantime takes its place.

    Args:
        run: Which run.
        terminal: Where its output is shown.
    """

    def __init__(self, run: RunDir, terminal: Terminal) -> None:
        self._run, self._terminal = run, terminal
        self._pace = Pace()
        self._drawn = self._looked = self._bar = float("-inf")
        self._written = False

    def wrote(self, *, bar: bool) -> None:
        """Take note that output was shown; a progress bar has the last line for itself."""
        self._written, self._drawn = True, float("-inf")
        self._bar = time.monotonic() if bar else float("-inf")

    def draw(self, state: RunState, ranks: frozenset[int] | None, *, owns: bool, keys: bool) -> None:
        """Show the line as it is now, unless that was a moment ago."""
        now = time.monotonic()
        if now - self._drawn < _EVERY or now - self._bar < _BAR_STAYS:
            return
        self._drawn = now
        if now - self._looked >= _LOOK_EVERY:
            self._looked = now
            self._look(state)
        watched = Watched(ranks=ranks, written=self._written, owns=owns, keys=keys)
        width = None if self._terminal.width is None else self._terminal.width - 1
        line = last_line(state, watched, self._pace, time.time(), self._terminal.glyphs, width)
        if line:
            self._terminal.transient(self._terminal.style(fit(line, width, self._terminal.glyphs), DIM))

    def _look(self, state: RunState) -> None:
        """See how far the first rank is."""
        first = state.workers.get(0)
        sample = None if first is None else read_latest_activity(self._run, first.node)
        if sample is None or sample.get("attempt") != state.attempt:
            return
        rank = (sample.get("ranks") or {}).get("0")
        inside = rank.get("inside") if rank is not None else None
        step = inside.get("step") if inside is not None else None
        if step is not None and sample.get("m") is not None:
            self._pace.seen(float(sample["m"]), step)
