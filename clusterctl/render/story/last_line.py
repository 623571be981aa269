"""The last line of the live view: what is followed, how far it is, and which keys there are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.formatting import format_duration
from clusterctl.render.ranks import count, fold_ranks
from clusterctl.render.terminal.console import fit
from clusterctl.render.terminal.wrapping import cells
from clusterctl.render.words import step_of

if TYPE_CHECKING:
    from clusterctl.render.terminal.console import Glyphs
    from clusterctl.run.rules.state import RunState

_WINDOW = 60.0
"""Seconds over which the speed is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What the line tells.

    Attributes:
        ranks: Whose output is shown; `None` for all.
        written: Something of it was shown.
        owns: Ctrl-C ends the run, it does not only leave it.
        keys: Keys are heard.
    """

    ranks: frozenset[int] | None
    written: bool
    owns: bool
    keys: bool


class Pace:
    """How far the run is, and how fast it goes."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()

    def seen(self, moment: float, step: int) -> None:
        """Take note of the step at a moment (seconds, any clock); one that went back begins anew."""
        if self._steps and step < self._steps[-1][1]:
            self._steps.clear()
        if not self._steps or moment > self._steps[-1][0]:
            self._steps.append((moment, step))
        while len(self._steps) > 2 and moment - self._steps[0][0] > _WINDOW:
            self._steps.popleft()

    def texts(self, attempt: int = 0) -> list[str]:
        """Return `step 412` (of an attempt) and `3.1 it/s`, as far as they are known."""
        if not self._steps:
            return []
        (began, first), (last, step) = self._steps[0], self._steps[-1]
        if last <= began or step == first:
            return [f"step {step_of(step, attempt)}"]
        return [f"step {step_of(step, attempt)}", speed_text((step - first) / (last - began))]


def speed_text(speed: float) -> str:
    """Return steps a second (more than 0) as people say them: `3.1 it/s`, `20 s/it`."""
    return f"{speed:.1f} it/s" if speed >= 0.1 else f"{1 / speed:.0f} s/it"


def last_line(
    state: RunState, watched: Watched, pace: Pace, now: float, glyphs: Glyphs, width: int | None = None
) -> str:
    """Return the line; "" where there is nothing to tell. Where it is too long the keys stay.

    Args:
        state: The run.
        watched: What of it is shown.
        pace: How far it is.
        now: The head's wall clock.
        glyphs: The signs that the terminal can show.
        width: Columns that it may take.
    """
    if state.attempt < 0 or state.over:
        return ""
    up = sum(worker.pid is not None for worker in state.workers.values())
    if state.phase.value == "running" and not watched.written:
        parts = [f"importing{glyphs.ellipsis} ({up} of {count(len(state.workers), 'worker')} up, no output yet)"]
    elif state.phase.value in ("running", "stalled"):
        which = sorted(state.workers if watched.ranks is None else watched.ranks)
        shown = "all" if watched.ranks is None else f"{'rank' if len(which) == 1 else 'ranks'} {fold_ranks(which)} of"
        whom = f"{shown} {len(state.workers)}" + (" ranks" if watched.ranks is None else "")
        parts = [f"following {whom}", *pace.texts(state.attempt)]
    else:
        parts = [state.phase.value]
    if state.created is not None:
        parts.append(format_duration(now - state.created))
    keys = ["d detach", "^C stop" if watched.owns else "^C leave"] if watched.keys else []
    return _joined(parts, keys, glyphs, width)


def _joined(parts: list[str], keys: list[str], glyphs: Glyphs, width: int | None) -> str:
    """Leave out what tells least, which stands last, as long as there is no room for it before the keys."""
    dot = f" {glyphs.dot} "
    while width is not None and len(parts) > 1 and cells(dot.join([*parts, *keys])) > width:
        parts = parts[:-1]
    if width is not None:
        room = width - cells(dot.join(["", *keys]))
        parts = [fit(dot.join(parts), room, glyphs)] if room > 0 else []
    return dot.join([*parts, *keys])
