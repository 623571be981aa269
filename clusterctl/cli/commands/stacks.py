"""`clusterctl stacks`."""

from __future__ import annotations

import json

import click

from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.option_values import parse_rank_set, write_output
from clusterctl.cli.verdicts import collect_rank_evidence, refuse_unknown_ranks
from clusterctl.errors import ExitCode, NotFoundError
from clusterctl.render.error_messages import error_line
from clusterctl.render.speedscope import build_speedscope
from clusterctl.render.stack_report import render_stack_notes, render_stacks
from clusterctl.run.record import state_reader
from clusterctl.run.rules import stack_dump_parser


@click.command("stacks", cls=CliCommand)
@options.run_argument
@options.rank_set_option
@options.json_option
@click.option(
    "--speedscope", is_flag=True, help="Write a file for www.speedscope.app, which shows them as a flame graph."
)
@options.output_option("RUN.speedscope.json", "With --speedscope: write")
@click.pass_obj
def command(
    common: CommonOptions,
    reference: str | None,
    ranks: str | None,
    output: str | None,
    *,
    as_json: bool,
    speedscope: bool,
) -> int:
    """Show the current stacks of all ranks; equal stacks are shown once.

    The ranks keep running. Each worker with `job.inject` writes its own stacks, within about a second. The stacks of
    other workers are read by py-spy, if the node has py-spy. Without `job.inject` and py-spy, `stacks` shows only the
    data in /proc. `stacks` needs no controller.
    """
    options.refuse_combination(("--json", as_json), ("--speedscope", speedscope))
    if output is not None and not speedscope:
        raise click.UsageError("`--output` needs `--speedscope`")
    console = common.console()
    chosen = parse_rank_set(ranks)
    run = state_reader.find_run(reference)
    state, attended = state_reader.load_state_and_attendance(run)
    refuse_unknown_ranks(run, state, chosen)
    evidence = collect_rank_evidence(run, state, chosen)
    if not evidence.ranks and not evidence.errors:
        # Without a controller, the journal does not yet contain the ends of the workers.
        hint = None if attended else f"`clusterctl attach --adopt {run.run}` records how they ended"
        raise NotFoundError(f"{run.run}: {'none of these ranks' if chosen else 'no rank'} runs any more", hint=hint)
    stacks = stack_dump_parser.parse_rank_stacks(evidence.ranks)
    if speedscope:
        document = build_speedscope(run.run, stacks)
        if not document["profiles"]:
            raise NotFoundError(
                f"{run.run}: no Python stack is available", hint="`clusterctl stacks` gives the reasons"
            )
        text = json.dumps(document) + "\n"
        write_output(console, output, f"{run.run}.speedscope.json", text, quiet=common.quiet)
    elif as_json:
        console.write_stdout_json(stack_dump_parser.fold_stacks(stacks))
    else:
        console.write_stdout(*render_stacks(stack_dump_parser.fold_stacks(stacks), console.out))
    if not common.quiet:
        console.write_stderr(*render_stack_notes(evidence.ranks, console.err))
    console.write_stderr(*(error_line(f"{node}: {why}", console.err) for node, why in evidence.errors.items()))
    return int(ExitCode.NODE if evidence.errors else ExitCode.OK)
