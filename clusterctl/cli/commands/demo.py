"""`clusterctl demo`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import click

from clusterctl.cli import demo_cluster
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.demo_cluster import CUT_NODE, OWN_COMMAND, SMALL_DISK
from clusterctl.cli.follow.keyboard import AlternateScreen
from clusterctl.cli.option_values import parse_duration_option
from clusterctl.cli.status_views import load_status_view
from clusterctl.errors import RefusedError
from clusterctl.formatting import format_size
from clusterctl.logs.printed_values import PrintedSeries, find_printed_values
from clusterctl.logs.safe_text import clean_block, strip_colours
from clusterctl.render.asciicast import CastRecorder
from clusterctl.render.console import Terminal
from clusterctl.render.demo_screen import DemoView, render_demo
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import list_runs
from clusterctl.run.rules.state import RunPhase

if TYPE_CHECKING:
    from clusterctl.render.console import Console

_FRAME_S, _CALM_S, _MEND_S = 0.25, 4.0, 10.0
_KEYS = "kfcdq"


@click.command("demo", cls=CliCommand)
@click.option("--for", "duration", metavar="DURATION", help="End after this time.")
@click.option("--keys", metavar="KEYS", default="", help="Type these keys, each once the run is calm, such as `kfcdq`.")
@click.option(
    "--record", metavar="FILE", type=click.Path(path_type=Path), help="Record the terminal in an asciicast file."
)
@click.pass_obj
def command(common: CommonOptions, duration: str | None, keys: str, record: Path | None) -> int:
    """Train on four nodes of this machine, break them by keys, and see what clusterctl says.

    The nodes are folders, the training needs no library, and the demo leaves nothing behind. `k` kills a rank, `f`
    freezes a rank, `c` cuts the connection to a node for 10 seconds, `d` fills the disk of a node, and `q` ends the
    demo. Without a terminal, `--keys` plays the demo as text.
    """
    console = common.console()
    if unknown := sorted({*keys} - {*_KEYS}):
        raise click.UsageError(f"`--keys` has no key `{unknown[0]}`; the keys are {', '.join(_KEYS)}")
    seconds = parse_duration_option(duration, "--for")
    on_terminal = sys.stdin.isatty() and console.out.live
    if not (on_terminal or keys or seconds):
        raise RefusedError("the demo needs a terminal", hint="`clusterctl demo --keys kfcdq` plays it as text")
    if record is not None and not on_terminal:
        raise RefusedError("`--record` needs a terminal", hint="`script -c 'clusterctl demo --record FILE' /dev/null`")
    for folder in demo_cluster.list_abandoned_demos():
        console.write_stderr(f"removing {folder}, which a killed demo has left", *demo_cluster.remove_demo(folder))
    folder, lock = demo_cluster.make_demo_folder()
    refusal = demo_cluster.make_nodes(folder)
    with demo_cluster.guard_demo(folder) as farewell:
        os.environ.update(demo_cluster.make_environment(folder))
        demo = _Demo(folder, refusal)
        deadline = None if seconds is None else time.monotonic() + seconds
        # Without a terminal nobody could type the last key.
        script = _Script(demo, keys if on_terminal or deadline is not None else f"{keys}q", deadline)
        if on_terminal:
            _play_on_screen(demo, script, console.out, record)
        else:
            _play_as_text(demo, script, console)
    os.close(lock)
    console.write_stdout(*(clean for line in farewell for clean in clean_block(line.encode())), f"removed {folder}")
    return 0


class _Demo:
    """The run of a demo, what commands print about it, and the faults that keys cause.

    Args:
        folder: The folder of the nodes.
        disk_refusal: The reason why no disk can be filled; `None` if one can.
    """

    def __init__(self, folder: Path, disk_refusal: str | None) -> None:
        self._folder, self.note = folder, "" if disk_refusal is None else f"(d: {disk_refusal})"
        self._up_log, self._why_log = folder / "up.log", folder / "why.log"
        self._up = self._start("up", "cluster.yaml", log=self._up_log)
        self._why: subprocess.Popen[bytes] | None = None
        self._why_key: object = None
        self._why_lines: list[str] = []
        self._run: RunDir | None = None
        self._series: PrintedSeries | None = None
        self._act = "four nodes of this machine; the output is that of the commands after `$`"
        self._kills = 0
        self._faulty_attempt = -1
        self._is_disk_full = False
        self._mend_at: float | None = None
        self._calm_since: float | None = None

    def read(self) -> DemoView:
        """Return what commands say now, and mend a node whose time is over."""
        if self._run is None:
            self._run = next(iter(list_runs()), None)
        snapshot = None if self._run is None else load_status_view(self._run)
        up_lines = clean_block(self._up_log.read_bytes())
        losses: list[tuple[float, float]] = []
        now = time.monotonic()
        if self._run is not None and snapshot is not None:
            state = snapshot.state
            if self._series is None and state.workers:
                self._series = PrintedSeries(self._run.path, 0, state.clock_ahead_s)
            losses = [] if self._series is None else [*self._series.read().get("loss", ())]
            has_restarted = self._is_disk_full and state.attempt > self._faulty_attempt
            if self._mend_at is not None and (now >= self._mend_at or has_restarted):
                self._mend()
            is_stalled = state.stall is not None
            self._explain((state.attempt, is_stalled, state.is_over), has_problem=is_stalled or state.is_over)
            reached = all(state.find_node_phase(node).value == "running" for node in state.nodes)
            is_calm = state.phase is RunPhase.RUNNING and reached and not is_stalled and bool(losses)
            is_calm = is_calm and self._mend_at is None and state.attempt > self._faulty_attempt
            self._calm_since = None if not is_calm else self._calm_since or now
        return DemoView(
            snapshot=snapshot,
            losses=losses,
            act=self._act,
            up_lines=[line for line in up_lines if "step" not in find_printed_values(strip_colours(line))],
            why_lines=self._why_lines,
            note=self.note,
        )

    def is_calm(self) -> bool:
        """Return whether the run has trained for a while since the last fault."""
        return self._calm_since is not None and time.monotonic() - self._calm_since >= _CALM_S

    @property
    def is_over(self) -> bool:
        """Whether `clusterctl up` has ended."""
        return self._up.poll() is not None

    def press(self, key: str, view: DemoView) -> None:
        """Cause the fault of a key. A key without effect changes nothing."""
        if view.snapshot is None or key not in _KEYS:
            return
        if self._mend_at is not None:
            self._act = (
                f"{key}: the last fault ends in {self._mend_at - time.monotonic():.0f} s; press the key again then"
            )
            return
        state = view.snapshot.state
        if key in "kf":
            running = [w for _, w in sorted(state.workers.items()) if w.phase.value == "running" and w.pid]
            if not running:
                return
            worker = running[(2 + self._kills) % len(running)]
            self._kills += 1
            name, number = ("KILL", signal.SIGKILL) if key == "k" else ("STOP", signal.SIGSTOP)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid or 0, number)
            then = (
                "the ranks restart" if key == "k" else "after about 25 s the hang is confirmed, and the ranks restart"
            )
            self._act = f"{key}: kill -{name} {worker.pid}, which is rank {worker.rank} on {worker.node}; {then}"
        elif key == "c":
            demo_cluster.cut_node(self._folder, CUT_NODE)
            self._act = f"c: the connection to {CUT_NODE} is cut for {_MEND_S:.0f} s"
        elif self.note:
            return
        else:
            free = demo_cluster.fill_disk(self._folder, SMALL_DISK)
            self._act = f"d: a file of {format_size(free)} fills the disk of {SMALL_DISK}"
        self._why_lines, self._calm_since = [], None
        self._faulty_attempt = state.attempt if key != "c" else self._faulty_attempt
        self._is_disk_full = key == "d"
        self._mend_at = time.monotonic() + _MEND_S if key in "cd" else None

    def _mend(self) -> None:
        self._mend_at = None
        for node in (CUT_NODE, SMALL_DISK):
            demo_cluster.mend_node(self._folder, node)

    def _explain(self, key: object, *, has_problem: bool) -> None:
        """Ask `clusterctl why` about a new problem."""
        if self._why is not None and self._why.poll() is not None:
            self._why, self._why_lines = None, clean_block(self._why_log.read_bytes())
        if has_problem and self._run is not None and key != self._why_key and self._why is None:
            self._why_key = key
            self._why = self._start("why", self._run.run, log=self._why_log)

    def _start(self, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                [*OWN_COMMAND, "--color", "always", *arguments],
                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip


class _Script:
    """Types the keys of `--keys`, and `q` at the end of `--for`."""

    def __init__(self, demo: _Demo, keys: str, deadline: float | None) -> None:
        self._demo, self._keys, self._deadline = demo, keys, deadline
        self._ends_with_run = bool(keys) or deadline is not None

    def type_key(self) -> str | None:
        """Return the key that is due; `None` if there is none."""
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        if is_late or (self._ends_with_run and self._demo.is_over):
            return "q"
        if self._keys and self._demo.is_calm():
            key, self._keys = self._keys[0], self._keys[1:]
            return key
        return None


def _play_on_screen(demo: _Demo, script: _Script, terminal: Terminal, record: Path | None) -> None:
    recorder = None
    if record is not None:
        width, height = terminal.width or 0, terminal.height
        recorder = CastRecorder(terminal.stream, record, width, height)
        terminal.stream = cast("TextIO", recorder)
    with AlternateScreen(terminal) as screen:
        while True:
            view = demo.read()
            terminal.draw_screen(render_demo(view, time.time(), terminal, terminal.height))
            key = script.type_key() or screen.wait_for_key(_FRAME_S)
            if key in ("", "q", "Q", "\x03", "\x04"):
                break
            if key is not None:
                demo.press(key, view)
    if recorder is not None:
        terminal.stream = recorder.original
        recorder.close()


def _play_as_text(demo: _Demo, script: _Script, console: Console) -> None:
    """Print what is new, in the order in which it is said."""
    shown, why, act = 0, [""], ""
    while (key := script.type_key()) != "q":
        view = demo.read()
        if key is not None:
            demo.press(key, view)
        news = [] if view.act == act else [view.act]
        news += view.up_lines[shown:]
        if view.why_lines and view.why_lines != why:
            news += [f"$ clusterctl why {view.snapshot.state.run if view.snapshot else ''}", *view.why_lines]
        console.write_stdout(*news)
        shown, why, act = len(view.up_lines), [*view.why_lines], view.act
        time.sleep(_FRAME_S)
