"""`clusterctl top`."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import click

from clusterctl.cli import options
from clusterctl.cli.command import CliCommand, CommonOptions, offer
from clusterctl.cli.follow.screen import Screen
from clusterctl.cli.follow.top_data import TopDataSource
from clusterctl.cli.lookup import machines
from clusterctl.cli.words import parse_pause
from clusterctl.render.top_rows import SORTS, Level, SortState, TopData
from clusterctl.render.top_screen import current_level, render_top

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.cli.lookup.machines import Subject
    from clusterctl.render.console import Console, Terminal
    from clusterctl.render.stats import NodeStats

_LOOK_AGAIN = 2.0
_TALLEST = 1 << 16
_IN_A_PIPE = 46
"""Lines of the one picture that is printed where nobody can scroll; where they are too few rows are folded."""


@click.command("top", cls=CliCommand)
@click.argument("reference", metavar="[RUN|FILE]", required=False, shell_complete=offer("runs"))
@click.option("--interval", metavar="DURATION", default="1s", show_default=True, help="Time between two pictures.")
@click.option(
    "--fold",
    type=click.Choice([level.value for level in Level]),
    help="What a row stands for; by default the finest of which all rows have room.",
)
@click.pass_obj
def command(common: CommonOptions, reference: str | None, interval: str, fold: str | None) -> int:
    """Keep ranks, GPUs and nodes on the screen; `q` or Ctrl-C leaves, the run goes on.

    A letter sorts (n node, r rank, u util, m memory, t temp, p power, c cpu, s step, i it/s, o output), the same again
    turns the order round; f folds: a row a rank, a node, or for all nodes that are alike; arrows and page keys scroll.
    Without an active run the nodes of the cluster file are shown. In a pipe it prints one picture.
    """
    console = common.console()
    pause = parse_pause(interval, "--interval") or 1.0
    order = SortState(fold=None if fold is None else Level(fold))
    with _source(common, machines.subject_of(reference), console) as source:
        if not (sys.stdin.isatty() and console.out.live):
            console.data(*_once(source, order, console))
            return 0
        _keep(source, order, console.out, pause)
    return 0


class Source(Protocol):
    """Where pictures come from."""

    def scene(self) -> TopData:
        """Return what there is to show now."""


def _once(source: Source, order: SortState, console: Console) -> list[str]:
    height = _IN_A_PIPE if order.fold is None else _TALLEST
    scene, now = source.scene(), time.time()
    level = current_level(scene, order, now, console.out, height)
    lines, _ = render_top(scene, replace(order, fold=level), now, console.out, _TALLEST)
    return [line for line in lines[:-1] if line]


def _keep(source: Source, order: SortState, terminal: Terminal, pause: float) -> None:
    with Screen(terminal) as screen:
        scene = source.scene()
        while True:
            height, now = terminal.height, time.time()
            lines, order = render_top(scene, order, now, terminal, height)
            terminal.draw_screen(lines)
            key = screen.key(pause)
            if key in ("", "q", "Q", "\x03", "\x04"):
                return
            if key is None:
                scene = source.scene()
            elif key == "f":
                levels = [*Level]
                place = levels.index(current_level(scene, order, now, terminal, height))
                order = replace(order, fold=levels[(place + 1) % len(levels)], first=0)
            else:
                order = _pressed(key, order, page=max(1, height - 6))


def _pressed(key: str, order: SortState, page: int) -> SortState:
    """Return the order after a key; a first row that does not exist is put right when it is shown."""
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page, " ": page, "g": -(1 << 20)}
    if key in steps:
        return replace(order, first=max(0, order.first + steps[key]))
    if key not in SORTS:
        return order
    turned = not order.is_reversed if order.by == SORTS[key] else False
    return replace(order, by=SORTS[key], is_reversed=turned, first=0)


@contextlib.contextmanager
def _source(common: CommonOptions, subject: Subject, console: Console) -> Iterator[Source]:
    if subject.run is not None:
        yield TopDataSource(subject.run)
        return
    from clusterctl.cli.lookup.reach import reachable

    spec = options.load_file(common, subject.path, console=console).spec
    with reachable(spec, spec.hosts) as (sessions, errors):
        joined = [host for host in spec.hosts if host.name in sessions]
        dead = {n.node: n for n in machines.unreachable(errors)}

        def look() -> list[NodeStats]:
            seen = {n.node: n for n in machines.look_at(joined, sessions)} | dead
            return [seen[host.name] for host in spec.hosts]

        yield _OfFile(f"{subject.path}: no active run", look)


class _OfFile:
    """Nodes that are asked again and again, beside the keys: one that is slow must not hold them up."""

    def __init__(self, title: str, look: LookAgain) -> None:
        self._title, self._look = title, look
        self._seen = look()
        threading.Thread(target=self._repeat, name="look", daemon=True).start()

    def _repeat(self) -> None:
        while True:
            time.sleep(_LOOK_AGAIN)
            self._seen = self._look()

    def scene(self) -> TopData:
        return TopData(nodes=self._seen, title=self._title)


class LookAgain(Protocol):
    """Asks all nodes once."""

    def __call__(self) -> list[NodeStats]:
        """Return what they said."""
