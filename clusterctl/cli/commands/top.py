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

from clusterctl.cli import cluster_selection, node_stats
from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.follow.keyboard import AlternateScreen
from clusterctl.cli.node_sessions import open_reachable_sessions
from clusterctl.cli.node_stats import StatsSource
from clusterctl.cli.option_values import parse_interval_option
from clusterctl.cli.run_data import RunDataReader
from clusterctl.render.top_rows import SORTS, FoldLevel, TableOrder, TopData
from clusterctl.render.top_screen import compute_fold_level, render_top

if TYPE_CHECKING:
    from clusterctl.render.console import Console, Terminal

_PROBE_INTERVAL_S = 2.0
_UNLIMITED_HEIGHT = 1 << 16
_HEIGHT_IN_PIPE = 46
"""Maximum lines of the table in a pipe. If there are more rows, similar rows are folded."""


@click.command("top", cls=CliCommand)
@click.argument("reference", metavar="[RUN|FILE]", required=False, shell_complete=make_completer("runs"))
@click.option("--interval", metavar="DURATION", default="1s", show_default=True, help="Time between two updates.")
@click.option(
    "--fold",
    type=click.Choice([level.value for level in FoldLevel]),
    help="What one row shows; by default the finest level that fits on the screen.",
)
@click.pass_obj
def command(common: CommonOptions, reference: str | None, interval: str, fold: str | None) -> int:
    """Show ranks, GPUs and nodes live; `q` or Ctrl-C quits, and the run goes on.

    A letter sorts the rows (n node, r rank, u util, m memory, t temp, p power, c cpu, s step, i it/s, o output); the
    same letter again reverses the order. `f` changes the content of a row: a rank, a node, or a group of similar nodes.
    Arrows and page keys scroll. Without an active run, `top` shows the nodes of the cluster file. In a pipe, `top`
    prints the table once.
    """
    console = common.console()
    pause = parse_interval_option(interval, "--interval") or 1.0
    order = TableOrder(fold_level=None if fold is None else FoldLevel(fold))
    with _open_source(common, node_stats.find_stats_source(reference), console) as load_data:
        if not (sys.stdin.isatty() and console.out.live):
            console.write_stdout(*_render_once(load_data, order, console))
            return 0
        _run_screen(load_data, order, console.out, pause)
    return 0


def _render_once(load_data: Callable[[], TopData], order: TableOrder, console: Console) -> list[str]:
    height = _HEIGHT_IN_PIPE if order.fold_level is None else _UNLIMITED_HEIGHT
    data, now = load_data(), time.time()
    level = compute_fold_level(data, order, now, console.out, height)
    lines, _ = render_top(data, replace(order, fold_level=level), now, console.out, _UNLIMITED_HEIGHT)
    return [line for line in lines[:-1] if line]


def _run_screen(load_data: Callable[[], TopData], order: TableOrder, terminal: Terminal, pause: float) -> None:
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
                levels = [*FoldLevel]
                place = levels.index(compute_fold_level(data, order, now, terminal, height))
                order = replace(order, fold_level=levels[(place + 1) % len(levels)], first_row=0)
            else:
                order = _apply_key(key, order, page=max(1, height - 6))


def _apply_key(key: str, order: TableOrder, page: int) -> TableOrder:
    """Return the table order after a key was typed. The first visible row may not exist; rendering corrects this."""
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page, " ": page, "g": -(1 << 20)}
    if key in steps:
        return replace(order, first_row=max(0, order.first_row + steps[key]))
    if key not in SORTS:
        return order
    turned = not order.is_reversed if order.column == SORTS[key] else False
    return replace(order, column=SORTS[key], is_reversed=turned, first_row=0)


@contextlib.contextmanager
def _open_source(common: CommonOptions, source: StatsSource, console: Console) -> Iterator[Callable[[], TopData]]:
    if source.run is not None:
        yield RunDataReader(source.run).load_data
        return
    spec = cluster_selection.load_chosen_cluster_file(common, source.cluster_file, console=console).spec
    with open_reachable_sessions(spec, spec.hosts) as (sessions, errors):
        stats = node_stats.probe_node_stats(spec.hosts, sessions, errors)

        def probe_again() -> None:
            nonlocal stats
            while True:
                time.sleep(_PROBE_INTERVAL_S)
                stats = node_stats.probe_node_stats(spec.hosts, sessions, errors)

        # Measure in a separate thread, so that a slow node does not delay the reaction to keys.
        threading.Thread(target=probe_again, name="look", daemon=True).start()
        yield lambda: TopData(nodes=stats, title=f"{source.cluster_file}: no active run")
