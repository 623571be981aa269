"""`clusterctl wait`."""

from __future__ import annotations

import json
import select
import time
from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.errors import ExitCode

if TYPE_CHECKING:
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState

_LOOK = 1.0


@click.command("wait")
@options.run_argument
@click.option("--timeout", metavar="DURATION", help="Give up after this long (exit code 124), e.g. 90s or 2h.")
@options.json_option
@options.output_options
def command(reference: str | None, timeout: str | None, as_json: bool, color: str, quiet: bool) -> int:
    """Wait until a run ends; exit with its code."""
    from clusterctl.cli.follow.following import exit_code_of
    from clusterctl.cli.words import parse_duration
    from clusterctl.run.record.find import find

    console = options.console_of(color)
    run = find(reference)
    limit = parse_duration(timeout, "--timeout")
    if console.err.live and not quiet:
        console.err.transient(f"waiting for {run.run} to end, Ctrl-C leaves it running")
    state, code = _wait(run, None if limit is None else time.monotonic() + limit)
    console.err.clear()
    if code is None:
        code = exit_code_of(state)
    if as_json:
        console.data(json.dumps({"run": run.run, "state": state.phase.value, "exit_code": state.exit_code}))
    elif not quiet:
        console.narrate(f"{run.run}: {state.phase.value}" + (_why(code)))
    return code


def _why(code: int) -> str:
    if code == ExitCode.WAIT_TIMED_OUT:
        return "; gave up waiting"
    return " without a controller; `clusterctl attach --adopt` takes over" if code == ExitCode.UNATTENDED else ""


def _wait(run: RunDir, deadline: float | None) -> tuple[RunState, int | None]:
    from clusterctl.run.controller.control import Bell
    from clusterctl.run.record.reader import StateReader

    reader, bell = StateReader(run), Bell(run)
    while True:
        attended = bell.clear() or run.attended
        reader.refresh()
        if reader.state.over:
            return reader.state, None
        if not attended:
            return reader.state, int(ExitCode.UNATTENDED)
        left = _LOOK if deadline is None else min(_LOOK, deadline - time.monotonic())
        if left <= 0:
            return reader.state, int(ExitCode.WAIT_TIMED_OUT)
        fd = bell.fileno()
        select.select([] if fd is None else [fd], [], [], left)
