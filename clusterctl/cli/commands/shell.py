"""`clusterctl shell`."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import click

from clusterctl import rlimits
from clusterctl.agent.protocol.command_payload_types import RankArguments, WriteScriptArguments
from clusterctl.cli import cluster_selection, options
from clusterctl.cli.base_command import CommonOptions, PassthroughCommand, make_completer
from clusterctl.cli.node_sessions import build_ad_hoc_spec, open_reachable_sessions
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec, HostSpec, SshSpec, TransportKind, load_spec
from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.plan.launch import build_program_arguments
from clusterctl.run.nodes.fan_out import raise_first
from clusterctl.run.record import state_reader
from clusterctl.session.request_definitions import SHELL_SCRIPT
from clusterctl.suggestion import find_similar
from clusterctl.transport.local import build_terminal_argv
from clusterctl.transport.openssh import OpenSshTransport
from clusterctl.transport.ssh.underlying_stream import PreDialer


@click.command("shell", cls=PassthroughCommand, reads_file=True)
@click.argument("node", metavar="[NODE]", required=False, shell_complete=make_completer("nodes"))
@options.single_node_options
@click.pass_obj
def command(
    common: CommonOptions, *, node: str | None, host: str | None, rank: int | None, reference: str | None
) -> int:
    """Open a terminal on a node, in its code folder and with the job's environment and prologue.

    With `--rank`, the terminal is on the node of that rank, in its folder and with its environment. A program that you
    start there is not part of the run, and continues when the run ends. The words after `--` run instead of the shell.

    `shell` runs your own `ssh -t` with the host, user, port, key and jump hosts of the cluster file. If a node is
    reached by a transport command, `shell` runs this command with a terminal (`srun --pty`, `docker exec -it`).
    """
    target = find_shell_target(common, node=node, host=host, rank=rank, reference=reference)
    if not (os.isatty(0) and os.isatty(1)):
        hint = "`clusterctl exec --nodes NODE -- COMMAND` needs no terminal"
        raise RefusedError("standard input and output are not a terminal", hint=hint)
    program: WriteScriptArguments = {"rank": target.rank}
    if target.rank is None and host is None:
        program = {"rank": None, **build_program_arguments(target.spec, target.host.name)}
    if common.passthrough_arguments:
        program["argv"] = list(common.passthrough_arguments)
    with open_reachable_sessions(target.spec, [target.host], is_started_run=target.rank is not None) as (
        sessions,
        errors,
    ):
        raise_first(errors)
        script = SHELL_SCRIPT.call(sessions[target.host.name], program)["path"]
    replace_process(_build_terminal_argv(target.spec.ssh, target.host, script))


def _build_terminal_argv(ssh: SshSpec, host: HostSpec, script: str) -> list[str]:
    if isinstance(host.transport, tuple):
        return build_terminal_argv(host, script)
    if host.transport is TransportKind.LOCAL:
        return ["/bin/sh", script]
    return OpenSshTransport(ssh, PreDialer()).build_terminal_argv(host, f"sh {shlex.quote(script)}")


def replace_process(argv: Sequence[str]) -> NoReturn:
    """Replace this process by a program (`exec`).

    Raises:
        RefusedError: The program is not installed.
    """
    if shutil.which(argv[0]) is None:
        raise RefusedError(f"there is no `{argv[0]}` on this machine", hint="install it")
    rlimits.restore_rlimits(os.getpid())
    # Python ignores these signals; without this reset the program would ignore them too.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(argv[0], list(argv))


@dataclass(frozen=True, slots=True)
class ShellTarget:
    """The node to which `shell` or `port-forward` connects.

    Attributes:
        spec: The cluster of the node, and its job.
        host: The node.
        rank: The requested rank of a live run, or `None`.
    """

    spec: ClusterSpec
    host: HostSpec
    rank: RankArguments | None = None


def find_shell_target(
    common: CommonOptions, *, node: str | None, host: str | None, rank: int | None, reference: str | None
) -> ShellTarget:
    """Return the node that the options name; without them, the first node of the file.

    Args:
        common: The common options, which name the cluster file.
        node: A node of the file.
        host: A host that needs no cluster file.
        rank: A rank of a live run.
        reference: The run of the rank.

    Raises:
        click.UsageError: The options contradict each other.
        NotFoundError: There is no such node or rank.
    """
    chosen = [name for name, value in (("`NODE`", node), ("`-w`", host), ("`--rank`", rank)) if value is not None]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} cannot be used together: each names a node")
    if rank is not None or host is not None:
        options.refuse_options_with(
            "--rank" if host is None else "-w", ("--file", common.files), ("--set", common.sets)
        )
    if rank is not None:
        return _find_target_of_rank(reference, rank)
    if reference is not None:
        raise click.UsageError("`--run` needs `--rank`")
    if host is not None:
        spec = build_ad_hoc_spec(host)
    else:
        spec = cluster_selection.load_chosen_cluster_file(
            common, None, with_secrets=True, console=common.console()
        ).spec
    return ShellTarget(spec, _find_host(spec, node))


def _find_host(spec: ClusterSpec, node: str | None) -> HostSpec:
    if node is None:
        return spec.hosts[0]
    for host in spec.hosts:
        if host.name == node:
            return host
    names = [host.name for host in spec.hosts]
    close = find_similar(node, names)
    raise NotFoundError(
        f"no node `{node}`", hint=f"did you mean `{close}`?" if close else f"there are: {fold_hosts(names)}"
    )


def _find_target_of_rank(reference: str | None, rank: int) -> ShellTarget:
    run = state_reader.find_run(reference)
    state, _ = state_reader.load_state_and_attendance(run)
    if state.is_over or rank not in state.workers:
        what = "is over" if state.is_over else f"has no rank {rank}" if state.workers else "has not started"
        raise NotFoundError(f"{run.run} {what}", hint="`clusterctl ps` lists the active runs")
    spec = load_spec(run.spec.read_text())
    node = state.workers[rank].node
    return ShellTarget(spec, _find_host(spec, node), {"run": run.run, "node": node, "rank": rank})
