"""`clusterctl profile`."""

from __future__ import annotations

import gzip
import os
import tempfile
import time
from pathlib import Path

import click

from clusterctl.agent.protocol.record_types import RankProfile
from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.node_sessions import open_reachable_sessions
from clusterctl.cli.option_values import parse_interval_option, parse_rank_set
from clusterctl.cli.verdicts import refuse_unknown_ranks
from clusterctl.config.spec import load_spec
from clusterctl.errors import ExitCode, RefusedError
from clusterctl.formatting import describe_duration, format_size
from clusterctl.render.error_messages import error_line
from clusterctl.render.profile_trace import INVALID_PROFILE_ERRORS, convert_profile
from clusterctl.render.trace_events import TraceEvent, encode_trace
from clusterctl.run.nodes.profile_requests import request_profiles
from clusterctl.run.record import state_reader

_MAX_S = 60.0
_ENDED: RankProfile = {"method": "none", "why": ["the rank does not run any more"], "began": 0.0, "main_thread": None}
_METHOD_NAMES = {
    "torch": "torch's profiler",
    "py-spy": "py-spy",
    "samples": "samples of its stacks",
    "signal": "dumps of its stacks by signal",
}


@click.command("profile", cls=CliCommand)
@options.run_argument
@options.rank_set_option
@click.option("--for", "length", metavar="DURATION", default="5s", show_default=True, help="Record this long.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write to this file, compressed if its name ends with .gz; RUN.profile.json.gz by default.",
)
@click.pass_obj
def command(common: CommonOptions, reference: str | None, ranks: str | None, length: str, output: str | None) -> int:
    """Record what chosen ranks do now, as a trace for ui.perfetto.dev. The code of the job needs no change.

    A rank with `job.inject` and torch 2.7 or later records the operations of all its threads, the collectives and the
    GPU kernels with torch's profiler. The stacks of other ranks, and of ranks that hang in C code, are sampled by
    py-spy if the node has it, or else by the signal of `clusterctl stacks`. At the end of the recording, torch stops
    the rank while it writes the trace. `profile` needs no controller.
    """
    console = common.console()
    chosen, seconds = parse_rank_set(ranks), parse_interval_option(length, "--for")
    if chosen is None:
        raise click.UsageError("`profile` needs `--rank`, e.g. `--rank 0,3`")
    if seconds is None or seconds > _MAX_S:
        raise click.BadParameter(f"record at most {describe_duration(_MAX_S)}", param_hint="--for")
    run = state_reader.find_run(reference)
    state, _ = state_reader.load_state_and_attendance(run)
    refuse_unknown_ranks(run, state, chosen)
    spec = load_spec(run.spec.read_text())
    of_node = {node: [r for r in sorted(chosen) if state.workers[r].node == node] for node in state.nodes}
    hosts = [host for host in spec.hosts if of_node.get(host.name)]
    target, origin, notes = output or f"{run.run}.profile.json.gz", time.time(), list[str]()
    if not os.access(Path(target).parent, os.W_OK):
        raise RefusedError(f"{target} cannot be written: {Path(target).parent} is no writable folder")
    with tempfile.TemporaryDirectory() as folder:
        with open_reachable_sessions(spec, hosts, is_started_run=True) as (sessions, unreachable):
            answers, failed = request_profiles(run.run, of_node, seconds, sessions, Path(folder))
        errors = [
            f"{node}: {str(error).removeprefix(f'{node}: ')}" for node, error in {**unreachable, **failed}.items()
        ]
        events: list[TraceEvent] = []
        for node, answer in answers.items():
            for rank in of_node[node]:
                who, profile = f"rank {rank} on {node}", answer["ranks"].get(str(rank), _ENDED)
                method, why = profile["method"], "; ".join(profile["why"])
                if method not in _METHOD_NAMES:
                    errors.append(f"{who} cannot be profiled: {why}")
                    continue
                text = (Path(folder) / node / f"rank-{rank}.json").read_text(errors="replace")
                shift_s = -origin - state.clock_ahead_s(node)
                try:
                    events += convert_profile(profile, text, rank, f"rank {rank} {node}", shift_s)
                except INVALID_PROFILE_ERRORS as error:
                    errors.append(f"{who} sent an invalid profile: {error!r}")
                else:
                    notes.append(f"{who}: {_METHOD_NAMES[method]}" + (f" ({why})" if why else ""))
    if notes:
        _write_trace(target, encode_trace(events))
    if not common.quiet:
        console.write_stderr(*notes, *([f"{target}: {format_size(Path(target).stat().st_size)}"] if notes else []))
    console.write_stderr(*(error_line(error, console.err) for error in errors))
    return int(ExitCode.NODE if errors else ExitCode.OK)


def _write_trace(target: str, text: str) -> None:
    """Write the trace, compressed if the name of the file ends with `.gz`.

    Raises:
        RefusedError: The file cannot be written.
    """
    try:
        with gzip.open(target, "wt", compresslevel=3) if target.endswith(".gz") else open(target, "w") as file:
            file.write(text)
    except OSError as error:
        raise RefusedError(f"{target} cannot be written: {error.strerror or error}") from error
