"""`clusterctl top`."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from clusterctl.agent.protocol.run_files import format_output_path
from clusterctl.cli import node_stats, options
from clusterctl.cli.command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.follow.keyboard import AlternateScreen
from clusterctl.cli.node_sessions import open_reachable_sessions
from clusterctl.cli.node_stats import StatsSource
from clusterctl.cli.option_values import parse_pause_option
from clusterctl.cli.run_views import build_run_view, read_output_end
from clusterctl.logs.sanitize import strip_colours
from clusterctl.render.top_rows import SORTS, Level, SortState, TopData
from clusterctl.render.top_screen import current_level, render_top
from clusterctl.run.record import sample_files
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import StateReader
from clusterctl.run.rules.state import RunState

if TYPE_CHECKING:
    from clusterctl.render.console import Console, Terminal

_LOOK_AGAIN = 2.0
_TALLEST = 1 << 16
_IN_A_PIPE = 46
"""Lines of the table in a pipe; if they do not suffice, rows are folded."""


@click.command("top", cls=CliCommand)
@click.argument("reference", metavar="[RUN|FILE]", required=False, shell_complete=make_completer("runs"))
@click.option("--interval", metavar="DURATION", default="1s", show_default=True, help="Time between two updates.")
@click.option(
    "--fold",
    type=click.Choice([level.value for level in Level]),
    help="What one row shows; by default as fine as fits on the screen.",
)
@click.pass_obj
def command(common: CommonOptions, reference: str | None, interval: str, fold: str | None) -> int:
    """Show ranks, GPUs and nodes live; `q` or Ctrl-C quits, and the run goes on.

    A letter sorts the rows (n node, r rank, u util, m memory, t temp, p power, c cpu, s step, i it/s, o output); the
    same letter again reverses the order. `f` changes whether a row is a rank, a node, or a group of similar nodes.
    Arrows and page keys scroll. Without an active run, it shows the nodes of the cluster file. In a pipe, it prints the
    table once.
    """
    console = common.console()
    pause = parse_pause_option(interval, "--interval") or 1.0
    order = SortState(fold=None if fold is None else Level(fold))
    with _open_source(common, node_stats.find_stats_source(reference), console) as load_data:
        if not (sys.stdin.isatty() and console.out.live):
            console.data(*_render_once(load_data, order, console))
            return 0
        _run_screen(load_data, order, console.out, pause)
    return 0


def _render_once(load_data: Callable[[], TopData], order: SortState, console: Console) -> list[str]:
    height = _IN_A_PIPE if order.fold is None else _TALLEST
    data, now = load_data(), time.time()
    level = current_level(data, order, now, console.out, height)
    lines, _ = render_top(data, replace(order, fold=level), now, console.out, _TALLEST)
    return [line for line in lines[:-1] if line]


def _run_screen(load_data: Callable[[], TopData], order: SortState, terminal: Terminal, pause: float) -> None:
    with AlternateScreen(terminal) as screen:
        data = load_data()
        while True:
            height, now = terminal.height, time.time()
            lines, order = render_top(data, order, now, terminal, height)
            terminal.draw_screen(lines)
            key = screen.wait_for_key(pause)
            if key in ("", "q", "Q", "\x03", "\x04"):
                return
            if key is None:
                data = load_data()
            elif key == "f":
                levels = [*Level]
                place = levels.index(current_level(data, order, now, terminal, height))
                order = replace(order, fold=levels[(place + 1) % len(levels)], first=0)
            else:
                order = _apply_key(key, order, page=max(1, height - 6))


def _apply_key(key: str, order: SortState, page: int) -> SortState:
    """Return the order after a key; rendering corrects a first row that does not exist."""
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page, " ": page, "g": -(1 << 20)}
    if key in steps:
        return replace(order, first=max(0, order.first + steps[key]))
    if key not in SORTS:
        return order
    turned = not order.is_reversed if order.by == SORTS[key] else False
    return replace(order, by=SORTS[key], is_reversed=turned, first=0)


@contextlib.contextmanager
def _open_source(common: CommonOptions, subject: StatsSource, console: Console) -> Iterator[Callable[[], TopData]]:
    if subject.run is not None:
        yield _RunReader(subject.run).load_data
        return
    spec = options.load_chosen_cluster_file(common, subject.path, console=console).spec
    with open_reachable_sessions(spec, spec.hosts) as (sessions, errors):
        stats = node_stats.probe_nodes(spec.hosts, sessions, errors)

        def probe_again() -> None:
            nonlocal stats
            while True:
                time.sleep(_LOOK_AGAIN)
                stats = node_stats.probe_nodes(spec.hosts, sessions, errors)

        # On a thread of its own: a slow node must not delay the keys.
        threading.Thread(target=probe_again, name="look", daemon=True).start()
        yield lambda: TopData(nodes=stats, title=f"{subject.path}: no active run")


_SAMPLES_AT_FIRST = 400
"""Samples of each kind that are read at first, for all nodes together."""
_END = 4096


class _RunReader:
    """Reads the files of a run for each picture."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._reader = run, StateReader(run)
        self._gpus = node_stats.read_run_gpus(run)
        self._recent: dict[str, sample_files.NodeStats] = {}

    def load_data(self) -> TopData:
        """Return the current data."""
        self._reader.apply_new_events()
        state = self._reader.state
        nodes = sorted(state.nodes.values(), key=lambda node: node.node_rank)
        most = _SAMPLES_AT_FIRST // max(1, len(nodes))
        for node in nodes:
            if node.node not in self._recent:
                self._recent[node.node] = sample_files.NodeStats(self._run, node.node, max_first=most)
        recent = {node.node: self._recent[node.node] for node in nodes}
        for samples in recent.values():
            samples.refresh()
        newest = {name: r.activity for name, r in recent.items() if r.activity is not None}
        of_attempt = [s for s in newest.values() if s.get("attempt") == state.attempt]
        times = [newest[name]["t"] - state.ahead(name) for name in newest if newest[name] in of_attempt]
        paces = {w.rank: p for w in state.workers.values() if (p := recent[w.node].steps_per_s(w.rank)) is not None}
        stats = [node_stats.make_node_stats(state, name, r.health) for name, r in recent.items()]
        return TopData(
            nodes=stats,
            view=build_run_view(self._run, state, attended=self._run.is_attended, newest=newest),
            gpus_of=self._gpus,
            paces=paces,
            trends={
                (node.node, which): recent[node.node].list_utilisation(which)
                for node in stats
                for which in (None, *(gpu.gpu for gpu in node.gpus))
            },
            ranks_at=min(times, default=None),
            last_line=lambda rank: self._last_line(state, rank),
        )

    def _last_line(self, state: RunState, rank: int) -> str:
        path = self._run.node(state.workers[rank].node) / format_output_path(state.attempt, rank)
        lines = reversed(read_output_end(path, _END))
        return next((text for line in lines if (text := strip_colours(line).strip())), "")
