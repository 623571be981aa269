"""`clusterctl shell`."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from typing import TYPE_CHECKING, NoReturn

import click

from clusterctl import rlimits
from clusterctl.cli import options
from clusterctl.cli.command import CommonOptions, JobCommand, offer
from clusterctl.cli.lookup.reach import reachable
from clusterctl.cli.target import find_target
from clusterctl.config.spec import TransportKind
from clusterctl.errors import RefusedError
from clusterctl.plan.launch import build_program_arguments
from clusterctl.run.nodes.fan_out import raise_first
from clusterctl.session.requests import SHELL_SCRIPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.agent.protocol.command_types import ShellScriptArguments
    from clusterctl.config.spec import HostSpec, SshSpec


@click.command("shell", cls=JobCommand, reads_file=True)
@click.argument("node", metavar="[NODE]", required=False, shell_complete=offer("nodes"))
@options.target_options
@click.pass_obj
def command(
    common: CommonOptions, *, node: str | None, host: str | None, rank: int | None, reference: str | None
) -> int:
    """Open a terminal on a node, in its code folder and with the job's environment and prologue.

    With `--rank`, the terminal is on the node of that rank, with the folder and the environment of the rank. A program
    that you start there is not part of the run and outlives it. Words after `--` run instead of the shell.

    `shell` becomes your own `ssh -t`, with the host, user, port, key and jump hosts of the cluster file. A node with a
    command transport gets the same command (`srun --pty`, `docker exec -it`).
    """
    target = find_target(common, node=node, host=host, rank=rank, reference=reference)
    if not (os.isatty(0) and os.isatty(1)):
        hint = "`clusterctl exec --nodes NODE -- COMMAND` runs a command without one"
        raise RefusedError("standard input and output are no terminal", hint=hint)
    program: ShellScriptArguments = {"rank": target.rank}
    if target.rank is None and host is None:
        program = {"rank": None, **build_program_arguments(target.spec, target.host.name)}
    if common.job_arguments:
        program["argv"] = list(common.job_arguments)
    with reachable(target.spec, [target.host], of_run=target.rank is not None) as (sessions, errors):
        raise_first(errors)
        script = SHELL_SCRIPT.call(sessions[target.host.name], program)["path"]
    become_program(_terminal_argv(target.spec.ssh, target.host, script))


def _terminal_argv(ssh: SshSpec, host: HostSpec, script: str) -> list[str]:
    if isinstance(host.transport, tuple):
        from clusterctl.transport.local import terminal_argv

        return terminal_argv(host, script)
    if host.transport is TransportKind.LOCAL:
        return ["/bin/sh", script]
    from clusterctl.transport.openssh import OpenSshTransport
    from clusterctl.transport.ssh.predial import PreDialer

    return OpenSshTransport(ssh, PreDialer()).terminal_argv(host, f"sh {shlex.quote(script)}")


def become_program(argv: Sequence[str]) -> NoReturn:
    """Replace this process by a program.

    Raises:
        RefusedError: The program is not installed.
    """
    if shutil.which(argv[0]) is None:
        raise RefusedError(f"there is no `{argv[0]}` on this machine", hint="install it")
    rlimits.restore_rlimits(os.getpid())
    # Python ignores these signals, and a program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(argv[0], list(argv))
