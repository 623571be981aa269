"""`clusterctl ps`."""

from __future__ import annotations

import time

import click

from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.run_views import load_run_list_view, warn_of_unreadable_lines
from clusterctl.render.run_list import ps_hints, ps_json, render_ps, sort_runs
from clusterctl.run.record.state_reader import list_runs
from clusterctl.run.rules.state import RunPhase


@click.command("ps", cls=CliCommand)
@click.option("--all", "-a", "all_runs", is_flag=True, help="Also list ended runs.")
@options.json_option
@click.pass_obj
def command(common: CommonOptions, all_runs: bool, as_json: bool) -> int:
    """List the active runs, or all runs of this head with `-a`; the newest come first. `-q` prints only run ids.

    An ended run counts as active as long as its processes may remain on a node; the table names the node. Runs that
    failed before a worker started are at the end of the table. `--json` and `-q` keep the order of the table.
    """
    options.refuse_combination(("--json", as_json), ("--quiet", common.quiet))
    console = common.console()
    views = [load_run_list_view(run) for run in list_runs()]
    shown = sort_runs([v for v in views if all_runs or v.state.may_run or v.state.phase is RunPhase.UNREADABLE])
    for view in views:
        warn_of_unreadable_lines(view.state, console)
    if as_json:
        console.write_stdout_json(ps_json(shown))
    elif common.quiet:
        console.write_stdout(*[v.state.run for v in shown])
    elif shown:
        console.write_stdout(*render_ps(shown, time.time(), console.out))
        console.write_stderr(*ps_hints(shown))
    else:
        console.write_stderr("no active run" if views else "no run yet")
        if views and not all_runs:
            console.write_stderr("`clusterctl ps -a` lists the ended runs")
    return 0
