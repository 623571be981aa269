"""`clusterctl attach`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.errors import RefusedError

if TYPE_CHECKING:
    from clusterctl.run.record.rundir import RunDir


@click.command("attach")
@options.run_argument
@click.option("--adopt", is_flag=True, help="Start a new controller if the run has none.")
@click.option(
    "--rank", "ranks", metavar="SET", help="Only these ranks, e.g. 0-3,7.", shell_complete=options.offer("ranks")
)
@click.option("--all", "everything", is_flag=True, help="All ranks in full.")
@click.option(
    "--tail", "-n", type=click.IntRange(0), metavar="N", default=20, show_default=True, help="Lines of what was before."
)
@click.option("--timestamps", "-t", is_flag=True, help="Show times before lines.")
@options.verbose_option("Tell what each node reports.")
@options.output_options
def command(
    reference: str | None,
    adopt: bool,
    ranks: str | None,
    everything: bool,
    tail: int,
    timestamps: bool,
    verbose: bool,
    color: str,
    quiet: bool,
) -> int:
    """Follow a run; `d` or Ctrl-C leaves it running. Ends with the run's exit code."""
    from clusterctl.cli.follow.following import conclude
    from clusterctl.cli.follow.view import RunScreen, ViewOptions
    from clusterctl.cli.lookup.runs import tell_unread
    from clusterctl.cli.words import parse_ranks
    from clusterctl.render.log import Timestamps
    from clusterctl.run.record import find

    run = find.find(reference)
    console = options.console_of(color)
    state, attended = find.visible_state(run)
    tell_unread(state, console)
    if adopt and not state.over:
        if attended:
            console.narrate(f"{run.run} has a controller already")
        else:
            _adopt(run)
    elif state.over and reference is None:
        raise RefusedError("no active run to attach to", hint=f"`clusterctl logs {run.run}` shows the last one")
    screen = RunScreen(
        run,
        console,
        ViewOptions(
            ranks=parse_ranks(ranks),
            everything=everything,
            timestamps=Timestamps.SHORT if timestamps else Timestamps.NONE,
            tail=tail,
            verbose=verbose,
            phases=False,
        ),
    )
    return conclude(run, screen.follow(), screen.state, console, quiet=quiet)


def _adopt(run: RunDir) -> None:
    from clusterctl.run.controller import process
    from clusterctl.run.controller.main import adopt_run

    process.detach(run, lambda: adopt_run(run))
