"""The last line of the live view: what is followed, how far it is, and which keys there are."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from clusterctl.formatting import format_duration, name_ranks, plural
from clusterctl.render.console import DIM, Glyphs, Terminal, fit
from clusterctl.render.line_wrapping import count_columns
from clusterctl.render.live_view import LiveView
from clusterctl.render.run_messages import format_step
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import read_latest_activity
from clusterctl.run.rules.state import RunState

_EVERY = 1.0
_LOOK_EVERY = 3.0
_BAR_STAYS = 3.0
_WINDOW = 60.0
"""Seconds over which the speed is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FooterContent:
    """The content of the footer.

    Attributes:
        ranks: Whose output is shown; `None` for all.
        has_output: Something of it was shown.
        stops_run: Ctrl-C ends the run, it does not only leave it.
        keys: Keys are heard.
    """

    ranks: frozenset[int] | None
    has_output: bool
    stops_run: bool
    accepts_keys: bool


class StepRate:
    """The step of a run, and its speed."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()

    def add(self, moment: float, step: int) -> None:
        """Add the step at a moment (seconds, any clock); a smaller step starts a new series."""
        if self._steps and step < self._steps[-1][1]:
            self._steps.clear()
        if not self._steps or moment > self._steps[-1][0]:
            self._steps.append((moment, step))
        while len(self._steps) > 2 and moment - self._steps[0][0] > _WINDOW:
            self._steps.popleft()

    def format(self, attempt: int = 0) -> list[str]:
        """Return `step 412` (of an attempt) and `3.1 it/s`, if they are known."""
        if not self._steps:
            return []
        (began, first), (last, step) = self._steps[0], self._steps[-1]
        if last <= began or step == first:
            return [f"step {format_step(step, attempt)}"]
        return [f"step {format_step(step, attempt)}", format_step_rate((step - first) / (last - began))]


def format_step_rate(speed: float) -> str:
    """Return steps a second (more than 0) as people say them: `3.1 it/s`, `20 s/it`."""
    return f"{speed:.1f} it/s" if speed >= 0.1 else f"{1 / speed:.0f} s/it"


def format_footer(
    state: RunState, content: FooterContent, step_rate: StepRate, now: float, glyphs: Glyphs, width: int | None = None
) -> str:
    """Return the footer, empty without content; if it is too long, the keys remain.

    Args:
        state: The run.
        content: What of it is shown.
        step_rate: How far it is.
        now: The head's wall clock.
        glyphs: The signs that the terminal can show.
        width: Columns that it may take.
    """
    if state.attempt < 0 or state.is_over:
        return ""
    up = sum(worker.pid is not None for worker in state.workers.values())
    if state.phase.value == "running" and not content.has_output:
        parts = [f"importing{glyphs.ellipsis} ({up} of {plural(len(state.workers), 'worker')} up, no output yet)"]
    elif state.phase.value in ("running", "stalled"):
        which = sorted(state.workers if content.ranks is None else content.ranks)
        shown = "all" if content.ranks is None else f"{name_ranks(which)} of"
        whom = f"{shown} {len(state.workers)}" + (" ranks" if content.ranks is None else "")
        parts = [f"following {whom}", *step_rate.format(state.attempt)]
    else:
        parts = [state.phase.value]
    if state.created is not None:
        parts.append(format_duration(now - state.created))
    keys = ["d detach", "^C stop" if content.stops_run else "^C leave"] if content.accepts_keys else []
    return _joined(parts, keys, glyphs, width)


def _joined(parts: list[str], keys: list[str], glyphs: Glyphs, width: int | None) -> str:
    """Join the parts that fit before the keys; the last parts are the least important."""
    dot = f" {glyphs.dot} "
    while width is not None and len(parts) > 1 and count_columns(dot.join([*parts, *keys])) > width:
        parts = parts[:-1]
    if width is not None:
        room = width - count_columns(dot.join(["", *keys]))
        parts = [fit(dot.join(parts), room, glyphs)] if room > 0 else []
    return dot.join([*parts, *keys])


class Footer:
    """Draws the line once a second; what is written in the meantime takes its place.

    Args:
        run: Which run.
        live: Where the line is drawn.
        terminal: Where its output is shown.
    """

    def __init__(self, run: RunDir, live: LiveView, terminal: Terminal) -> None:
        self._run, self._live, self._terminal = run, live, terminal
        self._step_rate = StepRate()
        self._drawn = self._looked = self._bar = float("-inf")
        self._written = False

    def note_output(self, *, bar: bool) -> None:
        """Take note that output was shown; a progress bar has the last line for itself."""
        self._written, self._drawn = True, float("-inf")
        self._bar = time.monotonic() if bar else float("-inf")

    def draw(self, state: RunState, ranks: frozenset[int] | None, *, stops_run: bool, accepts_keys: bool) -> None:
        """Show the line as it is now, unless that was a moment ago."""
        now = time.monotonic()
        if now - self._drawn < _EVERY or now - self._bar < _BAR_STAYS:
            return
        self._drawn = now
        if now - self._looked >= _LOOK_EVERY:
            self._looked = now
            self._look(state)
        content = FooterContent(ranks=ranks, has_output=self._written, stops_run=stops_run, accepts_keys=accepts_keys)
        width = None if self._terminal.width is None else self._terminal.width - 1
        line = format_footer(state, content, self._step_rate, time.time(), self._terminal.glyphs, width)
        if line:
            self._live.draw(self._terminal.style(fit(line, width, self._terminal.glyphs), DIM))

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
            self._step_rate.add(float(sample["m"]), step)
