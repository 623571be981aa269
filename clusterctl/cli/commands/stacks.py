"""`clusterctl stacks`."""

from __future__ import annotations

from collections.abc import Collection

import click

from clusterctl.agent.protocol.stall_folders import list_stall_folders
from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.option_values import parse_rank_set
from clusterctl.cli.verdicts import collect_rank_evidence
from clusterctl.errors import ExitCode, NotFoundError
from clusterctl.render.error_messages import error_line
from clusterctl.render.stack_report import render_stack_notes, render_stacks
from clusterctl.run.record import state_reader
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import stack_dump_parser
from clusterctl.run.rules.state import RunState


@click.command("stacks", cls=CliCommand)
@options.run_argument
@options.rank_set_option
@options.json_option
@click.pass_obj
def command(common: CommonOptions, reference: str | None, ranks: str | None, as_json: bool) -> int:
    """Show the current stacks of all ranks; equal stacks are shown once.

    The ranks keep running. Each worker with `job.inject` writes its stacks when it gets a signal. The stacks of other
    workers are read by py-spy, if the node has py-spy. Without `job.inject` and py-spy, `stacks` shows only the data in
    /proc. `stacks` needs no controller.
    """
    console = common.console()
    chosen = parse_rank_set(ranks)
    run = state_reader.find_run(reference)
    state, attended = state_reader.load_state_and_attendance(run)
    _validate_ranks(run, state, chosen)
    evidence = collect_rank_evidence(run, state, chosen)
    if not evidence.ranks and not evidence.errors:
        # Without a controller, the journal does not yet contain the ends of the workers.
        hint = None if attended else f"`clusterctl attach --adopt {run.run}` records how they ended"
        raise NotFoundError(f"{run.run}: {'none of these ranks' if chosen else 'no rank'} runs any more", hint=hint)
    folded = stack_dump_parser.fold_stacks(stack_dump_parser.parse_rank_stacks(evidence.ranks))
    if as_json:
        console.write_stdout_json(folded)
    else:
        console.write_stdout(*render_stacks(folded, console.out))
    if not common.quiet:
        console.write_stderr(*render_stack_notes(evidence.ranks, console.err))
    console.write_stderr(*(error_line(f"{node}: {why}", console.err) for node, why in evidence.errors.items()))
    return int(ExitCode.NODE if evidence.errors else ExitCode.OK)


def _validate_ranks(run: RunDir, state: RunState, ranks: Collection[int] | None) -> None:
    """Raise an error if the run has no workers, or if a rank is unknown.

    Raises:
        NotFoundError: The run is over, or it has no such rank.
    """
    if state.is_over or not state.workers:
        folders = list_stall_folders(str(run.path))
        hint = f"evidence of its last stall: {run.path / folders[-1]}" if folders else None
        what = "is over" if state.is_over else "has not started"
        raise NotFoundError(f"{run.run} {what}, so no rank is running", hint=hint)
    missing = sorted(set(ranks or ()) - set(state.workers))
    if missing:
        raise NotFoundError(f"{run.run} has no rank {missing[0]}; its ranks are 0-{max(state.workers)}")
