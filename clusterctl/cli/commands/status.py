"""`clusterctl status`."""

from __future__ import annotations

import time
from dataclasses import replace

import click

from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.run_views import warn_of_unreadable_lines
from clusterctl.cli.status_views import load_status_view
from clusterctl.logs.printed_values import PrintedSeries
from clusterctl.render.status_report import has_row_per_rank, render_status, status_json
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.start_durations import read_start_times
from clusterctl.run.record.state_reader import find_run_to_read
from clusterctl.run.rules.state import RunState

_MAX_LINES = 2000
"""The most lines in which losses are searched, because `status` should be fast."""


@click.command("status", cls=CliCommand)
@options.run_argument
@options.json_option
@options.verbose_option("Show one row for each rank, even of a large run.")
@click.pass_obj
def command(common: CommonOptions, reference: str | None, as_json: bool, verbose: bool) -> int:
    """Show the state of a run, its nodes and workers, and its first failure."""
    options.refuse_combination(("--json", as_json), ("--quiet", common.quiet), ("--verbose", verbose))
    console = common.console()
    run = find_run_to_read(reference)
    view = load_status_view(run, with_output_times=lambda state: as_json or has_row_per_rank(state, all_rows=verbose))
    warn_of_unreadable_lines(view.state, console)
    if as_json:
        console.write_stdout_json(status_json(replace(view, start_durations=read_start_times(run))))
    elif common.quiet:
        console.write_stdout(view.state.phase.value)
    else:
        view = replace(view, losses=_read_losses(run, view.state))
        console.write_stdout_wrapped(*render_status(view, time.time(), console.out, all_rows=verbose))
    return 0


def _read_losses(run: RunDir, state: RunState) -> list[float]:
    """Return the losses among the last lines of the first rank."""
    if not state.workers:
        return []
    series = PrintedSeries(run.path, min(state.workers), state.clock_ahead_s, max_lines=_MAX_LINES).read()
    name = "loss" if "loss" in series else next((name for name in series if name != "step"), "")
    return [value for _, value in series.get(name, ())]
