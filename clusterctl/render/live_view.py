"""The live view at the bottom of a terminal: the phases of a start, and the nodes that a command waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import format_duration
from clusterctl.render.console import CYAN, DIM, GREEN, RED, Console, Glyphs, Terminal, fit, pad, safe
from clusterctl.render.line_wrapping import count_columns
from clusterctl.render.terminal_sanitizer import json_line
from clusterctl.run.rules.controller_events import StartStepProgress

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


class PhaseStatus(str, Enum):
    """How a phase is going, or went."""

    RUNNING = "running"
    OK = "ok"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProgress:
    """A phase as it is now.

    Attributes:
        name: connect, health, sync, resume, prepare, start.
        done: Nodes (or workers) that are through.
        total: The number of all nodes (or workers); 0 if the step counts nothing.
        detail: What a person wants to know about the step.
        waiting: Node and what it waits for, slowest first.
        seconds: Since it began.
        unit: What the step counts, singular.
    """

    name: str
    done: int = 0
    total: int = 0
    detail: str = ""
    waiting: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    status: PhaseStatus = PhaseStatus.RUNNING
    unit: str = "node"


def make_phase_progress(event: StartStepProgress) -> PhaseProgress:
    """Return a phase from the controller's last event about it."""
    end = PhaseStatus.RUNNING if not event.ended else PhaseStatus.FAIL if event.failed else PhaseStatus.OK
    fields = {key: getattr(event, key) for key in ("name", "done", "total", "detail", "seconds")}
    waiting = tuple((node, reason) for node, reason in event.waiting)
    return PhaseProgress(**fields, waiting=waiting, status=end, unit="worker" if event.name == "start" else "node")


def format_phase(view: PhaseProgress, glyphs: Glyphs, *, width: int | None = None, spin: int = 0) -> str:
    """Return the line of a phase without colours: sign, name, count, detail, and its time at the right."""
    sign = {
        PhaseStatus.RUNNING: glyphs.running[spin % len(glyphs.running)],
        PhaseStatus.OK: glyphs.ok,
        PhaseStatus.FAIL: glyphs.fail,
    }[view.status]
    count = f"{view.done}/{view.total}" if view.total else ""
    head = f"{pad(sign, count_columns(glyphs.ok))} {pad(view.name, _NAME)} {pad(count, _COUNT, right=True)}   "
    time = format_duration(view.seconds)
    room = (_LINE if width is None else min(width, _LINE)) - count_columns(head) - count_columns(time) - 2
    detail = safe(view.detail) if width is None else fit(safe(view.detail), max(room, 0), glyphs)
    return f"{head}{pad(detail, max(room, 0))}  {time}"


def describe_awaited_nodes(view: PhaseProgress, most: int | None = SLOWEST) -> str:
    """Return what a phase waits for: `2 of 4 nodes, waiting for gpu03: looking for Python for 4 s`.

    The slowest `most` are named; all, where it is `None`.
    """
    noun = view.unit if view.total == 1 else f"{view.unit}s"
    start = f"{view.done} of {view.total} {noun}"
    if not view.waiting:
        return start
    shown = "; ".join(f"{safe(node)}: {safe(reason)}" for node, reason in view.waiting[:most])
    more = len(view.waiting) - len(view.waiting[:most])
    return f"{start}, waiting for {shown}" + (f"; and {more} more" if more > 0 else "")


def list_awaited_nodes(view: PhaseProgress, glyphs: Glyphs, width: int | None, most: int | None = SLOWEST) -> list[str]:
    """Return a line for each of the `most` slowest nodes (`None`: for all), to stand below the phase."""
    shown = view.waiting[:most]
    widest = max((count_columns(safe(node)) for node, _ in shown), default=0)
    lines = [fit(f"    {pad(safe(node), widest)}  {safe(reason)}", width, glyphs) for node, reason in shown]
    more = len(view.waiting) - len(shown)
    return [*lines, f"    and {more} more"] if more > 0 else lines


class LiveView:
    """Phases of a start and a last line, redrawn in place on a terminal; elsewhere phases are lines as they end.

    Args:
        console: Phases and narration go to its stderr.
        mode: `auto` is `tty` if lines can be rewritten, else `plain`.
        every: Name every node that is waited for, as far as the terminal has lines for them.
    """

    def __init__(self, console: Console, *, mode: ProgressMode = ProgressMode.AUTO, every: bool = False) -> None:
        if mode is ProgressMode.AUTO:
            mode = ProgressMode.TTY if console.err.live else ProgressMode.PLAIN
        self._console, self._terminal = console, console.err
        self._mode = mode
        self._every = every
        self._view: PhaseProgress | None = None
        self._began = 0.0
        self._reminder, self._reminded_at = "", 0.0
        self._finished: set[str] = set()

    @property
    def has_phase(self) -> bool:
        """Whether a phase is shown that has not ended."""
        return self._view is not None

    def update(self, view: PhaseProgress, now: float) -> None:
        """Show a phase at `now` (seconds, monotonic); an ended phase is written once and stays."""
        if view.name in self._finished and view.status is not PhaseStatus.RUNNING:
            return
        if self._mode is ProgressMode.JSON:
            self._write_json(view)
        if view.status is PhaseStatus.RUNNING:
            if self._view is None or self._view.name != view.name:
                self._reminder, self._reminded_at = "", now
            self._view, self._began = view, now - view.seconds
            self._finished.discard(view.name)
            self.tick(now)
        else:
            self.close()
            self._finished.add(view.name)
            if self._mode in (ProgressMode.TTY, ProgressMode.PLAIN) or (
                self._mode is ProgressMode.QUIET and view.status is PhaseStatus.FAIL
            ):
                terminal = self._terminal
                terminal.write_line(self._paint(view, format_phase(view, terminal.glyphs, width=terminal.width)))

    def tick(self, now: float) -> None:
        """Redraw the phase on a terminal; elsewhere write the awaited nodes from time to time."""
        view = self._view
        if view is None:
            return
        view = replace(view, seconds=max(0.0, now - self._began))
        if self._mode is ProgressMode.TTY:
            self.draw(*self._phase_lines(view, spin=int(now / _SPIN_SECONDS)))
        elif self._mode is ProgressMode.PLAIN and now - self._reminded_at >= _REMIND_SECONDS and view.waiting:
            text = describe_awaited_nodes(view, None if self._every else SLOWEST)
            if text != self._reminder:
                self._terminal.write_line(f"{view.name}: {text}")
            self._reminder, self._reminded_at = text, now

    def draw(self, *lines: str) -> None:
        """Show lines at the bottom until something else is written."""
        self._console.out.clear()
        self._terminal.draw(lines)

    def note(self, *lines: str) -> None:
        """Write lines of narration above the phase that is drawn."""
        self._console.out.clear()
        if self._mode is ProgressMode.JSON:
            self._terminal.write_lines(json_line({"note": safe(line)}) for line in lines)
        else:
            self._terminal.write_wrapped(map(safe, lines))

    def close(self) -> None:
        """Remove the lines of a phase that has not ended."""
        self._terminal.clear()
        self._view = None

    # --- inside

    def _phase_lines(self, view: PhaseProgress, *, spin: int) -> list[str]:
        terminal, width = self._terminal, self._terminal.width
        lines = [self._paint(view, format_phase(view, terminal.glyphs, width=width, spin=spin))]
        if view.seconds >= 1.0:  # a quick phase needs no reasons
            # Lines that have scrolled out of the window could not be taken away again.
            most = max(terminal.height - 3, SLOWEST) if self._every else SLOWEST
            lines += [terminal.style(line, DIM) for line in list_awaited_nodes(view, terminal.glyphs, width, most)]
        return lines

    def _paint(self, view: PhaseProgress, line: str) -> str:
        colour = {PhaseStatus.OK: GREEN, PhaseStatus.FAIL: RED, PhaseStatus.RUNNING: CYAN}[view.status]
        sign, rest = line.split(" ", 1)
        return f"{self._terminal.style(sign, colour)} {rest}"

    def _write_json(self, view: PhaseProgress) -> None:
        fields = {key: getattr(view, key) for key in ("done", "total", "detail")}
        waiting = [list(pair) for pair in view.waiting]
        record = {"phase": view.name, "state": view.status.value, **fields, "waiting": waiting}
        self._terminal.write_line(json_line(record | {"seconds": round(view.seconds, 3)}))


_SILENT_SECONDS = 1.0
"""What takes no longer needs no word."""

_TICK = 0.5
_CONNECTING = "connecting"


def format_waiting_line(stages: Mapping[str, str], waited: float, limit: float) -> str:
    """Return the nodes that a command waits for, their stage, the time so far and the limit.

    Args:
        stages: What each node is at that is not there yet.
        waited: Seconds until now.
        limit: Seconds after which a node is given up that cannot be connected to.
    """
    alike = set(stages.values())
    what = alike.pop() if len(alike) == 1 else _CONNECTING
    until = f", given up after {limit:g} s" if what == _CONNECTING and waited < limit else ""
    return f"waiting for {fold_hosts(stages)}: {what}, {waited:.0f} s{until}"


class WaitingLine:
    """A last line with the nodes that a command waits for.

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

    def set_stage(self, node: str, stage: str) -> None:
        """Set the stage of a node; `joined` removes it from the line."""
        if stage == "joined":
            self._stages.pop(node, None)
        else:
            self._stages[node] = stage

    def __enter__(self) -> WaitingLine:
        if self._terminal is not None and self._terminal.live and self._stages:
            self._thread = threading.Thread(target=self._show, args=(self._terminal,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the updates and remove the line."""
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
                text = format_waiting_line(stages, time.monotonic() - began, self._limit)
                width = terminal.width
                terminal.draw([terminal.style(fit(text, width and width - 1, terminal.glyphs), DIM)])
