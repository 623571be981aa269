"""`clusterctl wait`."""

from __future__ import annotations

import json
import math
import time

import click

from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.follow.exit_report import get_run_exit_code
from clusterctl.cli.follow.poller import wait_for_end
from clusterctl.cli.option_values import parse_duration_option
from clusterctl.cli.run_views import predict_unattended_run
from clusterctl.errors import ExitCode
from clusterctl.render.run_messages import UnattendedOutlook
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import find_run
from clusterctl.run.rules.state import RunState


@click.command("wait", cls=CliCommand)
@options.run_argument
@click.option("--timeout", metavar="DURATION", help="Give up after this long (exit code 124), e.g. 90s or 2h.")
@options.json_option
@click.pass_obj
def command(common: CommonOptions, reference: str | None, timeout: str | None, as_json: bool) -> int:
    """Wait until a run ends; exit with the exit code of the run."""
    console = common.console()
    run = find_run(reference)
    limit = parse_duration_option(timeout, "--timeout")
    if console.err.live and not common.quiet:
        console.err.draw([f"waiting for {run.run} to end; Ctrl-C ends only the waiting"])
    state, code = wait_for_end(run, math.inf if limit is None else time.monotonic() + limit)
    console.err.clear()
    if code is None:
        code = get_run_exit_code(state)
    if as_json:
        console.write_stdout(json.dumps({"run": run.run, "state": state.phase.value, "exit_code": state.exit_code}))
    elif not common.quiet:
        console.write_stderr(f"{run.run}: {state.phase.value}" + _explain_code(run, state, code))
    return code


def _explain_code(run: RunDir, state: RunState, code: int) -> str:
    if code == ExitCode.WAIT_TIMED_OUT:
        return "; the time of `--timeout` is over"
    if code != ExitCode.UNATTENDED:
        return ""
    alone = predict_unattended_run(run, state)
    message = "" if alone.outlook is UnattendedOutlook.GOES_ON else f"; {alone.message}"
    return f" without a controller{message}; `clusterctl attach --adopt` starts a new controller"
