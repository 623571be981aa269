"""`clusterctl why`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterctl.agent.protocol.record_types import RankEvidence
from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.verdicts import load_verdict, load_verdict_with_evidence, open_bundle
from clusterctl.errors import ExitCode, RefusedError
from clusterctl.formatting import format_size
from clusterctl.render.end_report import render_verdict
from clusterctl.render.status_report import describe_slow_start
from clusterctl.run.record import run_bundle, state_reader
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.start_durations import read_start_times
from clusterctl.why.verdict import Confidence, Verdict

if TYPE_CHECKING:
    from clusterctl.render.console import Console


@click.command("why", cls=CliCommand)
@options.run_argument
@click.option(
    "--bundle",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Explain the run in this bundle, without connecting to nodes.",
)
@click.option(
    "--save",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Pack the evidence into a file (a bundle) for somebody else.",
)
@click.option("--redact", is_flag=True, help="With --save: leave out secrets, addresses and home folders.")
@options.json_option
@click.pass_obj
def command(
    common: CommonOptions, reference: str | None, bundle: Path | None, save: Path | None, redact: bool, as_json: bool
) -> int:
    """Explain what went wrong with a run, and which rank caused it.

    For a run that hangs, `why` names the rank that the other ranks wait for, and the line of code of this rank. For a
    failed run, `why` names the rank that failed first, and the reason. The evidence is stored with the run: exit
    statuses, stacks, counters of process groups, and kernel messages. `why` exits with 0 if it finds an answer, with
    exit code 100 otherwise.
    """
    console = common.console()
    if redact and save is None:
        raise click.UsageError("`--redact` needs `--save`")
    if bundle is not None:
        options.refuse_options_with("--bundle", ("RUN", reference), ("--save", save))
        with open_bundle(bundle) as run:
            return _print_verdict(console, load_verdict(run, live=False), as_json=as_json)
    of_folder = state_reader.find_run_of_folder(Path()) if reference is None else None
    run = of_folder or state_reader.find_run(reference)
    if of_folder is not None and not as_json:
        console.write_stderr(f"{run.run}, the newest run of this folder")
    verdict, new_evidence = load_verdict_with_evidence(run)
    if save is not None:
        _save_bundle(console, run, save, new_evidence, redact=redact, quiet=common.quiet)
    code = _print_verdict(console, verdict, as_json=as_json)
    if not as_json:
        console.write_stdout_wrapped(*describe_slow_start(read_start_times(run)))
    return code


def _print_verdict(console: Console, verdict: Verdict, *, as_json: bool) -> int:
    if as_json:
        console.write_stdout_json(verdict.as_json())
    else:
        console.write_stdout_wrapped(*render_verdict(verdict, console.out))
    return get_verdict_exit_code(verdict)


def get_verdict_exit_code(verdict: Verdict) -> int:
    """Return the exit code of `why` for a verdict."""
    return int(ExitCode.FAILED if verdict.confidence is Confidence.UNKNOWN else ExitCode.OK)


def _save_bundle(
    console: Console, run: RunDir, target: Path, new_evidence: Mapping[str, RankEvidence], *, redact: bool, quiet: bool
) -> None:
    try:
        written = run_bundle.save_bundle(run, target, new_evidence, redact=redact)
    except OSError as error:
        raise RefusedError(f"{target} cannot be written: {error.strerror or error}") from error
    if not quiet:
        console.write_stderr(f"{target}: {format_size(written)}; `clusterctl why --bundle {target}` explains it")
