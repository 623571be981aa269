"""`clusterctl shell`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.cli.choices import together
from clusterctl.cli.interactive.target import Target, TargetChoices, target_of
from clusterctl.cli.lookup.reach import reachable
from clusterctl.cli.main import WithJobArguments
from clusterctl.errors import ExitCode, RefusedError
from clusterctl.plan.launch import build_program_arguments
from clusterctl.render.exec_output import exit_code_of
from clusterctl.run.nodes.fan_out import raise_first

if TYPE_CHECKING:
    from clusterctl.agent.protocol.command_types import ProgramArguments
    from clusterctl.render.exec_output import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellChoices(TargetChoices):
    """What a person chose of `shell`."""


@click.command("shell", cls=WithJobArguments)
@click.argument("node", metavar="[NODE]", required=False, shell_complete=options.offer("nodes"))
@options.target_options
@options.output_options
@click.pass_context
@together(ShellChoices)
def command(context: click.Context, choices: ShellChoices) -> int:
    """Open a terminal on a node, in its code folder and with the job's environment and prologue.

    With `--rank` it is the node of that rank, and folder and environment are those that the rank itself has; what is
    started there is no part of the run, and outlives its end. What stands after `--` runs instead of the shell. `~.` at
    the beginning of a line leaves a terminal that does not answer.
    """
    console = choices.console()
    target = target_of(choices, console)
    if not (os.isatty(0) and os.isatty(1)):
        hint = "`clusterctl exec --node NODE -- COMMAND` runs a command without one"
        raise RefusedError("standard input and output are no terminal", hint=hint)
    program: ProgramArguments = (
        {} if target.rank or choices.where else build_program_arguments(target.spec, target.host.name)
    )
    if words := context.meta["clusterctl.args"]:
        program["argv"] = list(words)
    end = _work(target, program)
    if end is None:
        console.narrate(f"{target.host.name}: left")
        return int(ExitCode.INTERRUPTED)
    return exit_code_of(end)


def _work(target: Target, program: ProgramArguments) -> Answer | None:
    from clusterctl.cli.interactive import terminal
    from clusterctl.render.exec_output import answer_of

    with reachable(target.spec, [target.host], of_run=target.rank is not None) as (sessions, errors):
        raise_first(errors)
        try:
            end = terminal.show(sessions[target.host.name], program, target.rank, sys.stdin.fileno())
        except terminal.LeftError:
            return None
    return answer_of(end, b"", b"", None)
