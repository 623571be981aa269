"""The last line of the live view: the ranks that are followed, their step and speed, and the keys."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from clusterctl.formatting import format_duration, name_ranks, plural
from clusterctl.render.console import DIM, Glyphs, Terminal, fit
from clusterctl.render.line_wrapping import count_columns
from clusterctl.render.run_messages import format_step
from clusterctl.render.start_progress import StartProgressView
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import read_latest_activity
from clusterctl.run.rules.state import RunState

_EVERY = 1.0
_READ_STEP_EVERY = 3.0
_PROGRESS_BAR_STAYS = 3.0
_SPEED_WINDOW = 60.0
"""The last seconds over which the speed of a run is averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FooterContent:
    """The values that the footer of the live view shows.

    Attributes:
        ranks: The ranks whose output is shown; `None` for all ranks.
        has_output: Whether output of these ranks has been shown.
        stops_run: Whether Ctrl-C stops the run instead of only leaving the view.
        accepts_keys: Whether the command reads keys from the terminal.
    """

    ranks: frozenset[int] | None
    has_output: bool
    stops_run: bool
    accepts_keys: bool


class StepRate:
    """The step of a run, and its speed over the last minute."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()

    def add(self, moment: float, step: int) -> None:
        """Add the step of the run at `moment` (seconds of any clock).

        If the step is smaller than the last step, forget all earlier steps.
        """
        if self._steps and step < self._steps[-1][1]:
            self._steps.clear()
        if not self._steps or moment > self._steps[-1][0]:
            self._steps.append((moment, step))
        while len(self._steps) > 2 and moment - self._steps[0][0] > _SPEED_WINDOW:
            self._steps.popleft()

    def format(self, attempt: int = 0) -> list[str]:
        """Return the texts `step 412` and `3.1 it/s`; omit unknown values."""
        if not self._steps:
            return []
        (began, first), (last, step) = self._steps[0], self._steps[-1]
        if last <= began or step == first:
            return [f"step {format_step(step, attempt)}"]
        return [f"step {format_step(step, attempt)}", format_step_rate((step - first) / (last - began))]


def format_step_rate(speed: float) -> str:
    """Return a speed in steps per second (more than 0) as `3.1 it/s`, or as `20 s/it` if it is slow."""
    return f"{speed:.1f} it/s" if speed >= 0.1 else f"{1 / speed:.0f} s/it"


def format_footer(
    state: RunState, content: FooterContent, step_rate: StepRate, now: float, glyphs: Glyphs, width: int | None = None
) -> str:
    """Return the footer; "" if there is nothing to show. If the footer is too long, parts before the keys are cut.

    Args:
        state: The run.
        content: The ranks, the keys and other facts that the footer shows.
        step_rate: The step and the speed of the run.
        now: The head's wall clock.
        glyphs: The signs that the terminal can show.
        width: The largest number of columns.
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
    """Return the keys and as many other parts as fit; the last parts are omitted first."""
    dot = f" {glyphs.dot} "
    while width is not None and len(parts) > 1 and count_columns(dot.join([*parts, *keys])) > width:
        parts = parts[:-1]
    if width is not None:
        room = width - count_columns(dot.join(["", *keys]))
        parts = [fit(dot.join(parts), room, glyphs)] if room > 0 else []
    return dot.join([*parts, *keys])


class Footer:
    """Draws the footer once a second; other output replaces the footer.

    Args:
        run: The run that is followed.
        live: The live view that draws the line.
        terminal: The terminal with the output of the run.
    """

    def __init__(self, run: RunDir, live: StartProgressView, terminal: Terminal) -> None:
        self._run, self._live, self._terminal = run, live, terminal
        self._step_rate = StepRate()
        self._drawn = self._looked = self._bar = float("-inf")
        self._written = False

    def note_output(self, *, bar: bool) -> None:
        """Record that output was shown. The footer waits after a progress bar, because the bar uses the last line."""
        self._written, self._drawn = True, float("-inf")
        self._bar = time.monotonic() if bar else float("-inf")

    def draw(self, state: RunState, ranks: frozenset[int] | None, *, stops_run: bool, accepts_keys: bool) -> None:
        """Draw the footer, at most once a second."""
        now = time.monotonic()
        if now - self._drawn < _EVERY or now - self._bar < _PROGRESS_BAR_STAYS:
            return
        self._drawn = now
        if now - self._looked >= _READ_STEP_EVERY:
            self._looked = now
            self._update_step(state)
        content = FooterContent(ranks=ranks, has_output=self._written, stops_run=stops_run, accepts_keys=accepts_keys)
        width = None if self._terminal.width is None else self._terminal.width - 1
        line = format_footer(state, content, self._step_rate, time.time(), self._terminal.glyphs, width)
        if line:
            self._live.draw(self._terminal.style(fit(line, width, self._terminal.glyphs), DIM))

    def _update_step(self, state: RunState) -> None:
        """Read the step of rank 0."""
        first = state.workers.get(0)
        sample = None if first is None else read_latest_activity(self._run, first.node)
        if sample is None or sample.get("attempt") != state.attempt:
            return
        rank = (sample.get("ranks") or {}).get("0")
        inside = rank.get("inside") if rank is not None else None
        step = inside.get("step") if inside is not None else None
        if step is not None and sample.get("m") is not None:
            self._step_rate.add(float(sample["m"]), step)
