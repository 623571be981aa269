"""`clusterctl diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.run_views import load_view_without_output, warn_of_unreadable_lines
from clusterctl.formatting import format_duration
from clusterctl.render.attempt_table import describe_cause
from clusterctl.render.run_diff import differences_json, list_differences, render_differences
from clusterctl.run.record.diff_properties import RunProperties, read_run_properties
from clusterctl.run.record.state_reader import find_run
from clusterctl.run.rules.outcome import find_final_cause

if TYPE_CHECKING:
    from clusterctl.render.console import Console
    from clusterctl.render.status_report import RunSnapshot


@click.command("diff", cls=CliCommand)
@click.argument("first", metavar="RUN1", shell_complete=make_completer("runs"))
@click.argument("second", metavar="RUN2", shell_complete=make_completer("runs"))
@options.json_option
@click.pass_obj
def command(common: CommonOptions, first: str, second: str, as_json: bool) -> int:
    """Compare two runs: command, code, settings, environment, nodes, versions, health and outcome.

    `diff` reads only files on this head and connects to no node.
    """
    options.refuse_combination(("--json", as_json), ("--quiet", common.quiet))
    console = common.console()
    left, right = (_load_properties(reference, console) for reference in (first, second))
    if as_json:
        console.write_stdout_json(differences_json(left, right))
    elif common.quiet:
        console.write_stdout(*dict.fromkeys(row.section.value for row in list_differences(left, right)))
    else:
        console.write_stdout(*render_differences(left, right, console.out))
    return 0


def _load_properties(reference: str, console: Console) -> RunProperties:
    run = find_run(reference)
    view = load_view_without_output(run)
    warn_of_unreadable_lines(view.state, console)
    return read_run_properties(run, _describe_outcome(view))


def _describe_outcome(view: RunSnapshot) -> dict[str, str]:
    """Return the outcome of a run as named values, without unknown values."""
    state = view.state
    cause = find_final_cause(state)
    values = {
        "state": state.phase.value,
        "exit code": None if state.exit_code is None else str(state.exit_code),
        "why": None if cause is None else describe_cause(cause, with_message=True),
        "attempts": str(state.attempt + 1),
        "ranks": str(state.world_size),
        "step": None if view.step is None else str(view.step),
    }
    if state.created is not None and state.ended is not None:
        values["took"] = format_duration(state.ended - state.created)
    return {what: value for what, value in values.items() if value is not None}
