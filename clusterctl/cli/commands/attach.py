"""`clusterctl attach`."""

from __future__ import annotations

import click

from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.follow.exit_report import print_final_report
from clusterctl.cli.follow.run_screen import RunScreen, ScreenOptions
from clusterctl.cli.option_values import parse_rank_set
from clusterctl.cli.run_views import warn_of_unreadable_lines
from clusterctl.errors import NotFoundError
from clusterctl.render.log_output import Timestamps
from clusterctl.run.controller import detached_process
from clusterctl.run.controller.main import adopt_run
from clusterctl.run.record import state_reader


@click.command("attach", cls=CliCommand)
@options.run_argument
@click.option("--adopt", is_flag=True, help="Start a new controller if the run has none.")
@options.rank_set_option
@click.option("--all-ranks", is_flag=True, help="Show all ranks in full.")
@click.option(
    "--tail",
    "-n",
    type=click.IntRange(0),
    metavar="N",
    default=20,
    show_default=True,
    help="Number of earlier lines to show first.",
)
@click.option("--timestamps", "-t", is_flag=True, help="Show a time before each line.")
@options.verbose_option("Show the reports of each node.")
@click.pass_obj
def command(
    common: CommonOptions,
    *,
    reference: str | None,
    adopt: bool,
    ranks: str | None,
    all_ranks: bool,
    tail: int,
    timestamps: bool,
    verbose: bool,
) -> int:
    """Follow a run and exit with its exit code; `d` or Ctrl-C detaches, and the run goes on.

    `attach` first shows the latest lines of output, and the events of the same time.
    """
    options.refuse_combination(("--all-ranks", all_ranks), ("--rank", ranks))
    run = state_reader.find_run(reference)
    console = common.console()
    state, attended = state_reader.load_state_and_attendance(run)
    warn_of_unreadable_lines(state, console)
    if adopt and not state.is_over:
        if attended:
            console.write_stderr(f"{run.run} already has a controller")
        else:
            detached_process.run_detached(run, lambda: adopt_run(run))
    elif state.is_over and reference is None:
        raise NotFoundError(
            f"no run is active; the last run, {run.run}, has ended ({state.phase.value})",
            hint=f"`clusterctl status {run.run}` shows how it ended, `clusterctl logs {run.run}` shows its output",
        )
    screen_options = ScreenOptions(
        ranks=parse_rank_set(ranks),
        all_ranks=all_ranks,
        timestamps=Timestamps.SHORT if timestamps else Timestamps.NONE,
        tail=tail,
        verbose=verbose,
        shows_phases=False,
    )
    screen = RunScreen(run, console, screen_options)
    end_reason = screen.follow()
    return print_final_report(
        run, end_reason, screen.state, console, quiet=common.quiet, visible_output=screen.visible_output
    )
