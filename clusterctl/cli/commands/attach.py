"""`clusterctl attach`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.cli.choices import Choices, together
from clusterctl.cli.follow.outcome import report_exit
from clusterctl.cli.follow.view import RunScreen, ViewOptions
from clusterctl.cli.lookup.runs import tell_unread
from clusterctl.cli.main import WithExamples
from clusterctl.cli.words import parse_ranks
from clusterctl.errors import NotFoundError
from clusterctl.render.log_output import Timestamps
from clusterctl.run.controller import process
from clusterctl.run.record import run_lookup

if TYPE_CHECKING:
    from clusterctl.run.record.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachChoices(Choices):
    """What a person chose of `attach`."""

    reference: str | None
    adopt: bool
    ranks: str | None
    everything: bool
    tail: int
    timestamps: bool
    verbose: bool


@click.command("attach", cls=WithExamples)
@options.run_argument
@click.option("--adopt", is_flag=True, help="Start a new controller if the run has none.")
@click.option(
    "--rank",
    "ranks",
    metavar="SET",
    multiple=True,
    callback=options.joined,
    help="Only these ranks, e.g. 0-3,7.",
    shell_complete=options.offer("ranks"),
)
@click.option("--all", "everything", is_flag=True, help="All ranks in full.")
@click.option(
    "--tail", "-n", type=click.IntRange(0), metavar="N", default=20, show_default=True, help="Lines of what was before."
)
@click.option("--timestamps", "-t", is_flag=True, help="Show times before lines.")
@options.verbose_option("Tell what each node reports.")
@options.output_options
@together(AttachChoices)
def command(choices: AttachChoices) -> int:
    """Follow a run; `d` or Ctrl-C leaves it running. Ends with the run's exit code.

    What happened before stands among the last lines at its time, with its date.
    """
    options.refuse_together(("--all", choices.everything), ("--rank", choices.ranks))
    run = run_lookup.find_run(choices.reference)
    console = choices.console()
    state, attended = run_lookup.load_visible_state(run)
    tell_unread(state, console)
    if choices.adopt and not state.over:
        if attended:
            console.narrate(f"{run.run} has a controller already")
        else:
            _adopt(run)
    elif state.over and choices.reference is None:
        raise NotFoundError(
            f"no active run to attach to: {run.run}, the last one, has ended ({state.phase.value})",
            hint=f"`clusterctl status {run.run}` tells how, `clusterctl logs {run.run}` shows its output",
        )
    screen = RunScreen(run, console, _view_options(choices))
    leave = screen.follow()
    return report_exit(run, leave, screen.state, console, quiet=choices.quiet, shown=screen.shown)


def _view_options(choices: AttachChoices) -> ViewOptions:
    return ViewOptions(
        ranks=parse_ranks(choices.ranks),
        all_ranks=choices.everything,
        timestamps=Timestamps.SHORT if choices.timestamps else Timestamps.NONE,
        tail=choices.tail,
        verbose=choices.verbose,
        phases=False,
    )


def _adopt(run: RunDir) -> None:
    from clusterctl.run.controller.main import adopt_run

    process.detach(run, lambda: adopt_run(run))
