"""The live view in the last lines of a terminal: the phases of a start, and the nodes that a command waits for."""

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
    """The values of `--progress`."""

    AUTO = "auto"
    TTY = "tty"
    PLAIN = "plain"
    JSON = "json"
    QUIET = "quiet"


class PhaseStatus(str, Enum):
    """The status of a phase."""

    RUNNING = "running"
    OK = "ok"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProgress:
    """The progress of a phase of a run's start.

    Attributes:
        name: Name of the phase: connect, wait, health, sync, resume, prepare or start.
        done: The number of nodes (or workers) that have finished the phase.
        total: The number of all nodes (or workers); 0 if the phase counts nothing.
        detail: A short text about the phase, such as the names of the nodes.
        waiting: Each unfinished node and what it waits for, slowest first.
        seconds: The seconds since the start of the phase.
        unit: What the phase counts: `node` or `worker`.
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
    """Return the progress of a phase from the last event of the controller about the phase."""
    end = PhaseStatus.RUNNING if not event.ended else PhaseStatus.FAIL if event.failed else PhaseStatus.OK
    fields = {key: getattr(event, key) for key in ("name", "done", "total", "detail", "seconds")}
    waiting = tuple((node, reason) for node, reason in event.waiting)
    return PhaseProgress(**fields, waiting=waiting, status=end, unit="worker" if event.name == "start" else "node")


def format_phase(progress: PhaseProgress, glyphs: Glyphs, *, width: int | None = None, spin: int = 0) -> str:
    """Return the line of a phase without colours: sign, name, count and detail, with the time at the right."""
    sign = {
        PhaseStatus.RUNNING: glyphs.running[spin % len(glyphs.running)],
        PhaseStatus.OK: glyphs.ok,
        PhaseStatus.FAIL: glyphs.fail,
    }[progress.status]
    count = f"{progress.done}/{progress.total}" if progress.total else ""
    head = f"{pad(sign, count_columns(glyphs.ok))} {pad(progress.name, _NAME)} {pad(count, _COUNT, right=True)}   "
    time = format_duration(progress.seconds)
    room = (_LINE if width is None else min(width, _LINE)) - count_columns(head) - count_columns(time) - 2
    detail = safe(progress.detail) if width is None else fit(safe(progress.detail), max(room, 0), glyphs)
    return f"{head}{pad(detail, max(room, 0))}  {time}"


def describe_awaited_nodes(progress: PhaseProgress, max_nodes: int | None = SLOWEST) -> str:
    """Return a sentence such as `2 of 4 nodes, waiting for gpu03: looking for Python for 4 s`.

    The text names the `max_nodes` slowest nodes; all nodes if `max_nodes` is `None`.
    """
    noun = progress.unit if progress.total == 1 else f"{progress.unit}s"
    start = f"{progress.done} of {progress.total} {noun}"
    if not progress.waiting:
        return start
    shown = "; ".join(f"{safe(node)}: {safe(reason)}" for node, reason in progress.waiting[:max_nodes])
    more = len(progress.waiting) - len(progress.waiting[:max_nodes])
    return f"{start}, waiting for {shown}" + (f"; and {more} more" if more > 0 else "")


def list_awaited_nodes(
    progress: PhaseProgress, glyphs: Glyphs, width: int | None, max_nodes: int | None = SLOWEST
) -> list[str]:
    """Return a line for each of the `max_nodes` slowest nodes of a phase; for all nodes if `max_nodes` is `None`."""
    shown = progress.waiting[:max_nodes]
    widest = max((count_columns(safe(node)) for node, _ in shown), default=0)
    lines = [fit(f"    {pad(safe(node), widest)}  {safe(reason)}", width, glyphs) for node, reason in shown]
    more = len(progress.waiting) - len(shown)
    return [*lines, f"    and {more} more"] if more > 0 else lines


class StartProgressView:
    """Shows the phases of a start: on a terminal in place, elsewhere as one line at the end of each phase.

    Args:
        console: The view writes to stderr of this console.
        mode: How to show phases; `auto` means `tty` if the terminal can redraw lines, otherwise `plain`.
        name_all_nodes: Whether to name as many awaited nodes as the terminal has lines for.
    """

    def __init__(
        self, console: Console, *, mode: ProgressMode = ProgressMode.AUTO, name_all_nodes: bool = False
    ) -> None:
        if mode is ProgressMode.AUTO:
            mode = ProgressMode.TTY if console.err.live else ProgressMode.PLAIN
        self._console, self._terminal = console, console.err
        self._mode = mode
        self._name_all_nodes = name_all_nodes
        self._progress: PhaseProgress | None = None
        self._began = 0.0
        self._reminder, self._reminded_at = "", 0.0
        self._finished: set[str] = set()

    @property
    def has_phase(self) -> bool:
        """Whether the view shows a phase that has not ended."""
        return self._progress is not None

    def update(self, progress: PhaseProgress, now: float) -> None:
        """Show a phase. When a phase ends, its line is written once and remains. `now` is monotonic time in seconds."""
        if progress.name in self._finished and progress.status is not PhaseStatus.RUNNING:
            return
        if self._mode is ProgressMode.JSON:
            self._write_json(progress)
        if progress.status is PhaseStatus.RUNNING:
            if self._progress is None or self._progress.name != progress.name:
                self._reminder, self._reminded_at = "", now
            self._progress, self._began = progress, now - progress.seconds
            self._finished.discard(progress.name)
            self.tick(now)
        else:
            self.close()
            self._finished.add(progress.name)
            if self._mode in (ProgressMode.TTY, ProgressMode.PLAIN) or (
                self._mode is ProgressMode.QUIET and progress.status is PhaseStatus.FAIL
            ):
                terminal = self._terminal
                terminal.write_line(
                    self._paint(progress, format_phase(progress, terminal.glyphs, width=terminal.width))
                )

    def tick(self, now: float) -> None:
        """Redraw the phase on a terminal; elsewhere write the awaited nodes every few seconds."""
        progress = self._progress
        if progress is None:
            return
        progress = replace(progress, seconds=max(0.0, now - self._began))
        if self._mode is ProgressMode.TTY:
            self.draw(*self._phase_lines(progress, spin=int(now / _SPIN_SECONDS)))
        elif self._mode is ProgressMode.PLAIN and now - self._reminded_at >= _REMIND_SECONDS and progress.waiting:
            text = describe_awaited_nodes(progress, None if self._name_all_nodes else SLOWEST)
            if text != self._reminder:
                self._terminal.write_line(f"{progress.name}: {text}")
            self._reminder, self._reminded_at = text, now

    def draw(self, *lines: str) -> None:
        """Show lines at the bottom of the terminal until the next output."""
        self._console.out.clear()
        self._terminal.draw(lines)

    def note(self, *lines: str) -> None:
        """Write messages above the drawn phase."""
        self._console.out.clear()
        if self._mode is ProgressMode.JSON:
            self._terminal.write_lines(json_line({"note": safe(line)}) for line in lines)
        else:
            self._terminal.write_wrapped(map(safe, lines))

    def close(self) -> None:
        """Erase the drawn phase."""
        self._terminal.clear()
        self._progress = None

    # --- inside

    def _phase_lines(self, progress: PhaseProgress, *, spin: int) -> list[str]:
        terminal, width = self._terminal, self._terminal.width
        lines = [self._paint(progress, format_phase(progress, terminal.glyphs, width=width, spin=spin))]
        if progress.seconds >= 1.0:  # The awaited nodes of a quick phase are not shown.
            # If there were more lines than the window has, the window would scroll, and scrolled lines cannot be
            # erased.
            max_nodes = max(terminal.height - 3, SLOWEST) if self._name_all_nodes else SLOWEST
            lines += [
                terminal.style(line, DIM) for line in list_awaited_nodes(progress, terminal.glyphs, width, max_nodes)
            ]
        return lines

    def _paint(self, progress: PhaseProgress, line: str) -> str:
        colour = {PhaseStatus.OK: GREEN, PhaseStatus.FAIL: RED, PhaseStatus.RUNNING: CYAN}[progress.status]
        sign, rest = line.split(" ", 1)
        return f"{self._terminal.style(sign, colour)} {rest}"

    def _write_json(self, progress: PhaseProgress) -> None:
        fields = {key: getattr(progress, key) for key in ("done", "total", "detail")}
        waiting = [list(pair) for pair in progress.waiting]
        record = {"phase": progress.name, "state": progress.status.value, **fields, "waiting": waiting}
        self._terminal.write_line(json_line(record | {"seconds": round(progress.seconds, 3)}))


_SILENT_SECONDS = 1.0
"""The minimum duration in seconds of a wait that is shown."""

_TICK = 0.5
_CONNECTING = "connecting"


def format_waiting_line(stages: Mapping[str, str], waited: float, limit: float) -> str:
    """Return a line with the nodes that a command waits for, their stages, the time so far and the limit.

    Args:
        stages: Each awaited node with its stage.
        waited: The seconds of the wait until now.
        limit: The seconds after which the command gives up a node that it cannot connect to.
    """
    alike = set(stages.values())
    what = alike.pop() if len(alike) == 1 else _CONNECTING
    until = f", given up after {limit:g} s" if what == _CONNECTING and waited < limit else ""
    return f"waiting for {fold_hosts(stages)}: {what}, {waited:.0f} s{until}"


class WaitingLine:
    """Shows the nodes that a command waits for in the last line of a terminal.

    Args:
        nodes: The awaited nodes.
        limit: The seconds after which the command gives up a node that it cannot connect to.
        terminal: The terminal that shows the line; `None` shows nothing.
        stage: The stage of all nodes at the beginning.
        meanwhile: A function that is called before each update of the line; its output appears above the line.
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
        """Set the stage of a node; the stage `joined` removes the node from the line."""
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
