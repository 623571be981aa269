"""The lines of a live view: phases of a start, the nodes that a command waits for, and the last line."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import fold_ranks, format_duration, plural
from clusterctl.render.console import CYAN, DIM, GREEN, RED, YELLOW, fit, pad, safe
from clusterctl.render.run_messages import step_of
from clusterctl.render.sanitize import json_line
from clusterctl.render.wrapping import cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from clusterctl.render.console import Glyphs, Terminal
    from clusterctl.run.rules.controller_events import Phase
    from clusterctl.run.rules.state import RunState

SLOWEST = 5
_NAME, _COUNT = 9, 7
_LINE = 80
_REMIND_SECONDS = 5.0
_SPIN_SECONDS = 0.1


class ProgressMode(str, Enum):
    """What `--progress` chooses."""

    AUTO = "auto"
    TTY = "tty"
    PLAIN = "plain"
    JSON = "json"
    QUIET = "quiet"


class PhaseEnd(str, Enum):
    """How a phase is going, or went."""

    RUNNING = "running"
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseView:
    """A phase as it is now.

    Attributes:
        name: connect, health, sync, resume, prepare, start.
        done: Nodes (or workers) that are through.
        total: How many there are; 0 where nothing is counted.
        detail: What a person wants to know of it.
        waiting: Node and what it waits for, slowest first.
        seconds: Since it began.
        noun: What is counted, singular.
    """

    name: str
    done: int = 0
    total: int = 0
    detail: str = ""
    waiting: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    end: PhaseEnd = PhaseEnd.RUNNING
    noun: str = "node"


def phase_view(event: Phase) -> PhaseView:
    """Return a phase as the controller told of it last."""
    end = PhaseEnd.RUNNING
    if event.ended:
        end = PhaseEnd.FAIL if event.failed else PhaseEnd.OK
    return PhaseView(
        name=event.name,
        done=event.done,
        total=event.total,
        detail=event.detail,
        waiting=tuple((node, reason) for node, reason in event.waiting),
        seconds=event.seconds,
        end=end,
        noun="worker" if event.name == "start" else "node",
    )


def phase_line(view: PhaseView, glyphs: Glyphs, *, width: int | None = None, spin: int = 0) -> str:
    """Return the line of a phase without colours: sign, name, count, detail, and its time at the right."""
    sign = {
        PhaseEnd.RUNNING: glyphs.running[spin % len(glyphs.running)],
        PhaseEnd.OK: glyphs.ok,
        PhaseEnd.WARN: glyphs.warn,
        PhaseEnd.FAIL: glyphs.fail,
    }[view.end]
    count = f"{view.done}/{view.total}" if view.total else ""
    head = f"{pad(sign, cells(glyphs.ok))} {pad(view.name, _NAME)} {pad(count, _COUNT, right=True)}   "
    time = format_duration(view.seconds)
    room = (_LINE if width is None else min(width, _LINE)) - cells(head) - cells(time) - 2
    detail = safe(view.detail) if width is None else fit(safe(view.detail), max(room, 0), glyphs)
    return f"{head}{pad(detail, max(room, 0))}  {time}"


def waiting_text(view: PhaseView, most: int | None = SLOWEST) -> str:
    """Return what a phase waits for in one sentence: `2 of 4 nodes, waiting for gpu03: looking for Python for 4 s`.

    The slowest `most` are named; all, where it is `None`.
    """
    noun = view.noun if view.total == 1 else f"{view.noun}s"
    start = f"{view.done} of {view.total} {noun}"
    if not view.waiting:
        return start
    shown = "; ".join(f"{safe(node)}: {safe(reason)}" for node, reason in view.waiting[:most])
    more = len(view.waiting) - len(view.waiting[:most])
    return f"{start}, waiting for {shown}" + (f"; and {more} more" if more > 0 else "")


def waiting_lines(view: PhaseView, glyphs: Glyphs, width: int | None, most: int | None = SLOWEST) -> list[str]:
    """Return a line for each of the `most` slowest nodes (`None`: for all), to stand below the phase."""
    shown = view.waiting[:most]
    widest = max((cells(safe(node)) for node, _ in shown), default=0)
    lines = [fit(f"    {pad(safe(node), widest)}  {safe(reason)}", width, glyphs) for node, reason in shown]
    more = len(view.waiting) - len(shown)
    return [*lines, f"    and {more} more"] if more > 0 else lines


@dataclass
class _Shown:
    text: str = ""
    at: float = 0.0
    lines: int = 0
    finished: set[str] = field(default_factory=set)


class PhaseWriter:
    """Shows phases as they go by.

    Args:
        terminal: Stderr.
        mode: `auto` is `tty` where lines can be rewritten, else `plain`.
        every: Name every node that is waited for, as far as the terminal has lines for them.

    """

    def __init__(self, terminal: Terminal, *, mode: ProgressMode = ProgressMode.AUTO, every: bool = False) -> None:
        if mode is ProgressMode.AUTO:
            mode = ProgressMode.TTY if terminal.live else ProgressMode.PLAIN
        self._terminal = terminal
        self._mode = mode
        self._every = every
        self._view: PhaseView | None = None
        self._began = 0.0
        self._shown = _Shown()

    @property
    def drawing(self) -> bool:
        """A phase is being shown that has not ended."""
        return self._view is not None

    def update(self, view: PhaseView, now: float) -> None:
        """Show a phase as it is at `now` (seconds, monotonic); a phase that has ended is written once and stays."""
        if view.name in self._shown.finished and view.end is not PhaseEnd.RUNNING:
            return
        if self._mode is ProgressMode.JSON:
            self._json(view)
        if view.end is PhaseEnd.RUNNING:
            if self._view is None or self._view.name != view.name:
                self._shown.text, self._shown.at = "", now
            self._view, self._began = view, now - view.seconds
            self._shown.finished.discard(view.name)
            self.tick(now)
        else:
            self._finish(view)

    def tick(self, now: float) -> None:
        """Let time pass: redraw on a terminal; elsewhere tell from time to time which nodes are waited for."""
        view = self._view
        if view is None:
            return
        view = replace(view, seconds=max(0.0, now - self._began))
        if self._mode is ProgressMode.TTY:
            self._draw(view, spin=int(now / _SPIN_SECONDS))
        elif self._mode is ProgressMode.PLAIN and now - self._shown.at >= _REMIND_SECONDS and view.waiting:
            text = waiting_text(view, None if self._every else SLOWEST)
            if text != self._shown.text:
                self._terminal.line(f"{view.name}: {text}")
            self._shown.text, self._shown.at = text, now

    def note(self, *lines: str) -> None:
        """Write lines of narration, whatever they tell of, above the phase that is being drawn."""
        self._erase()
        if self._mode is ProgressMode.JSON:
            self._terminal.lines(json_line({"note": safe(line)}) for line in lines)
        else:
            self._terminal.prose(map(safe, lines))

    def close(self) -> None:
        """Take away the line of a phase that has not ended."""
        self._erase()
        self._view = None

    # --- inside

    def _finish(self, view: PhaseView) -> None:
        self._erase()
        self._view = None
        self._shown.finished.add(view.name)
        if self._mode in (ProgressMode.JSON, ProgressMode.QUIET) and view.end is not PhaseEnd.FAIL:
            return
        if self._mode is not ProgressMode.JSON:
            self._terminal.line(self._paint(view, phase_line(view, self._terminal.glyphs, width=self._terminal.width)))

    def _draw(self, view: PhaseView, *, spin: int) -> None:
        terminal, width = self._terminal, self._terminal.width
        lines = [self._paint(view, phase_line(view, terminal.glyphs, width=width, spin=spin))]
        if view.seconds >= 1.0:  # a quick phase needs no reasons
            # Lines that have scrolled out of the window could not be taken away again.
            most = max(terminal.height - 3, SLOWEST) if self._every else SLOWEST
            lines += [terminal.style(line, DIM) for line in waiting_lines(view, terminal.glyphs, width, most)]
        terminal.lines(lines, over=self._shown.lines)
        self._shown.lines = len(lines)

    def _erase(self) -> None:
        drawn, self._shown.lines = self._shown.lines, 0
        self._terminal.lines([], over=drawn)

    def _paint(self, view: PhaseView, line: str) -> str:
        colour = {PhaseEnd.OK: GREEN, PhaseEnd.WARN: YELLOW, PhaseEnd.FAIL: RED, PhaseEnd.RUNNING: CYAN}[view.end]
        sign, rest = line.split(" ", 1)
        return f"{self._terminal.style(sign, colour)} {rest}"

    def _json(self, view: PhaseView) -> None:
        record = {
            "phase": view.name,
            "state": view.end.value,
            "done": view.done,
            "total": view.total,
            "detail": view.detail,
            "waiting": [list(pair) for pair in view.waiting],
            "seconds": round(view.seconds, 3),
        }
        self._terminal.line(json_line(record))


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
    return f"waiting for {fold_hosts(stages)}: {what}, {waited:.0f} s{until}"


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
        parts = [f"importing{glyphs.ellipsis} ({up} of {plural(len(state.workers), 'worker')} up, no output yet)"]
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
