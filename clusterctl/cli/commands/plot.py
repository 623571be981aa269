"""`clusterctl plot`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.errors import NotFoundError
from clusterctl.logs.printed_values import PATTERNS, PrintedSeries
from clusterctl.render.charts import TimeAxis, select_curves
from clusterctl.render.console import BOLD, DIM
from clusterctl.render.line_chart import MIN_WIDTH, render_line_chart
from clusterctl.run.record import sample_files
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import Point
from clusterctl.run.record.state_reader import find_run_to_read, load_state

if TYPE_CHECKING:
    from clusterctl.run.rules.state import RunState

_DEFAULT_WIDTH, _MAX_WIDTH = 80, 160
_HEIGHT, _MIN_HEIGHT = 12, 5
_MACHINE_UNITS = {
    "gpu": "GPU utilisation, %",
    "cpu": "CPU utilisation, %",
    "gpu memory": "GPU memory, %",
    "memory": "memory, %",
    "temperature": "GPU temperature, °C",
    "power": "GPU power of a node, W",
}


def _parse_pattern(_: click.Context, __: click.Parameter, text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"{error} in `{text}`") from error
    if not pattern.groupindex:
        raise click.BadParameter("it needs a name for each value, such as `(?P<loss>[0-9.]+)`")
    return pattern


@click.command("plot", cls=CliCommand)
@click.argument("reference", metavar="[RUN]", required=False, shell_complete=make_completer("runs"))
@click.argument("names", metavar="[NAMES]", required=False)
@click.option(
    "--pattern",
    metavar="REGEX",
    callback=_parse_pattern,
    help="Find printed values by this regular expression; each named group is a value.",
)
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Read the output of this rank; by default the first.")
@click.pass_obj
def command(
    common: CommonOptions, reference: str | None, names: str | None, pattern: re.Pattern[str] | None, rank: int | None
) -> int:
    """Draw values of a run over time in the terminal: `clusterctl plot RUN loss,step,util`.

    NAMES are names of printed values, such as `loss` or `val_loss`, and `step`, `util` (of GPUs, otherwise of CPUs),
    `cpu`, `memory`, `gpu memory`, `temperature` and `power`. Without NAMES, `plot` draws the printed values, and the
    steps. `plot` finds losses and steps in the output of a rank by patterns, and shows the patterns; `--pattern` sets
    another one. It reads only files on this head.
    """
    console = common.console()
    if names is None and reference is not None and "," in reference:
        reference, names = None, reference
    run = find_run_to_read(reference)
    state = load_state(run)
    if not state.workers:
        raise NotFoundError(f"{run.run} has not started, so there is nothing to draw")
    source = min(state.workers) if rank is None else rank
    if source not in state.workers:
        raise NotFoundError(f"{run.run} has no rank {source}; its ranks are 0-{max(state.workers)}")
    printed = PrintedSeries(run.path, source, state.clock_ahead_s, pattern).read()
    known = _find_series(run, state, printed)
    wanted = [*printed, *(["step"] if "step" not in printed else [])] if names is None else names.split(",")
    wanted = ["gpu" if "gpu" in known else "cpu" if name == "util" else name for name in map(str.strip, wanted)]
    terminal = console.out
    width = max(MIN_WIDTH, min(terminal.width or _DEFAULT_WIDTH, _MAX_WIDTH))
    height = (
        max(_MIN_HEIGHT, min(_HEIGHT, (terminal.height - 4) // max(1, len(wanted)) - 2)) if terminal.live else _HEIGHT
    )
    axis = TimeAxis(state.created or 0.0, time.time() if state.ended is None else state.ended)
    for name in wanted:
        curves = select_curves(known.get(name, {}), axis)
        if not curves:
            others = ", ".join(known)
            hint = f"this run has {others}" if others else "`--pattern '(?P<loss>...)'` says how the values are printed"
            raise NotFoundError(f"{run.run} has no values `{name}`", hint=hint)
        console.write_stdout(
            terminal.style(_MACHINE_UNITS.get(name, name), BOLD), *render_line_chart(curves, width, height, terminal)
        )
    if not common.quiet and any(name in printed for name in wanted):
        used = {"pattern": pattern.pattern} if pattern is not None else PATTERNS
        lines = [f"{name}: printed by rank {source}, found by {text}" for name, text in used.items()]
        console.write_stdout(*(terminal.style(line, DIM) for line in lines))
    return 0


def _find_series(
    run: RunDir, state: RunState, printed: Mapping[str, Sequence[Point]]
) -> dict[str, Mapping[str, Sequence[Point]]]:
    """Return the curves of each name: printed values, steps of ranks, measurements of nodes."""
    nodes = dict.fromkeys(node for _, node, _ in state.placements)
    curves = sample_files.read_curves(run, {node: state.clock_ahead_s(node) for node in nodes})
    found: dict[str, Mapping[str, Sequence[Point]]] = {name: {name: points} for name, points in printed.items()}
    if curves.steps and "step" not in found:
        found["step"] = {f"rank {rank}": points for rank, points in curves.steps.items()}
    return found | dict(curves.machines)
