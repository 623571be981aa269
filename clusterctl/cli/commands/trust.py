"""`clusterctl trust`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING

import click

from clusterctl.cli import cluster_selection, options, trusted_commands
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.sections.build_context import HostCommandRunner
from clusterctl.config.spec import ClusterSpec, HostSpec, TransportKind
from clusterctl.errors import AuthError, ExitCode, NodeError, NodesError, RefusedError
from clusterctl.formatting import plural
from clusterctl.transport.openssh import OpenSshTransport
from clusterctl.transport.ssh.host_keys import add_to_known_hosts, explain_untrusted_key, fetch_host_keys
from clusterctl.transport.ssh.paramiko_transport import SshTransport
from clusterctl.transport.ssh.underlying_stream import PreDialer

if TYPE_CHECKING:
    from clusterctl.render.console import Console
    from clusterctl.transport.ssh.host_keys import PresentedKey


@click.command("trust", cls=CliCommand, reads_file=True)
@options.cluster_file_argument
@options.nodes_option
@click.option("--yes", "-y", is_flag=True, help="Accept without asking; compare the fingerprints first.")
@click.option("--login", is_flag=True, help="Also log in to each node, and share the connections with later commands.")
@click.pass_obj
def command(common: CommonOptions, path: str | None, nodes: str | None, yes: bool, login: bool) -> int:
    """Show the host keys of the nodes and accept new ones. Changed keys are never accepted.

    Commands in the cluster file that list hosts or connect to them run on this machine, so `trust` first shows them and
    asks whether to accept them.

    `--login` is for nodes that ask for a password or a code. `ssh` asks on this terminal, for one node after the other.
    All commands and runs then share the connections of `--login`, until one hour after the last use.
    """
    console = common.console()
    spec = cluster_selection.load_chosen_cluster_file(
        common, path, console=console, run_host_command=_make_host_list_runner(console, yes=yes)
    ).spec
    hosts = cluster_selection.select_spec_hosts(spec, nodes)
    _show_and_accept_commands(trusted_commands.list_unaccepted_commands(hosts), "to reach the hosts", console, yes=yes)
    failed = _print_refused_keys(_accept_new_keys(spec, hosts, console, yes=yes), console)
    if failed:
        return int(ExitCode.NODE)
    if not common.quiet:
        console.write_stderr(_describe_trusted_keys(hosts))
    if login:
        _log_in(spec, hosts, console)
    return 0


def _accept_new_keys(
    spec: ClusterSpec, hosts: Sequence[HostSpec], console: Console, *, yes: bool
) -> list[PresentedKey]:
    """Accept new host keys, first those of jump hosts; return the keys that cannot be accepted.

    Raises:
        NodesError: Nodes present no host key.
    """
    transport = SshTransport(spec.ssh)
    for _ in range(len(hosts) + 1):
        candidates, errors = fetch_host_keys(transport, hosts, parallel=spec.ssh.parallel)
        refused = [c for c in candidates if not c.can_be_added and c.verdict.name != "TRUSTED"]
        new = [c for c in candidates if c.can_be_added]
        if not new:
            break
        console.write_stdout(*[f"{fold_hosts(c.nodes)}  {c.key.type}  {c.key.fingerprint}" for c in new])
        _ask_for_consent(new, "key", "compare the fingerprints", yes=yes)
        add_to_known_hosts(new)
        console.write_stderr(f"accepted {len(new)} keys in {new[0].path}")
    else:
        refused, errors = [], {}
    if errors:
        _print_refused_keys(refused, console)
        raise NodesError(list(errors.values()))
    return refused


def _describe_trusted_keys(hosts: Sequence[HostSpec]) -> str:
    if any(host.transport is TransportKind.SSH for host in hosts):
        return "all host keys are trusted"
    return "no host is reached by SSH: there are no host keys"


def _make_host_list_runner(console: Console, *, yes: bool) -> HostCommandRunner:
    def run(argv: trusted_commands.Argv) -> str:
        _show_and_accept_commands(
            [] if trusted_commands.is_accepted_command(argv) else [argv], "to list the hosts", console, yes=yes
        )
        return trusted_commands.run_host_command(argv)

    return run


def _show_and_accept_commands(new: list[trusted_commands.Argv], purpose: str, console: Console, *, yes: bool) -> None:
    if new:
        console.write_stderr(f"commands that will run on this machine {purpose} of the file:")
        console.write_stdout(*[f"  {shlex.join(argv)}" for argv in new])
        _ask_for_consent(new, "command", "read it", yes=yes)
        trusted_commands.accept_commands(new)
        console.write_stderr(f"accepted {plural(len(new), 'command')}")


def _ask_for_consent(new: Sized, what: str, before: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise RefusedError("stdin is not a terminal, so `trust` cannot ask", hint=f"{before}, then add `--yes`")
    if not click.confirm(f"accept {f'this {what}' if len(new) == 1 else f'these {len(new)} {what}s'}?", err=True):
        raise RefusedError("nothing was accepted")


def _print_refused_keys(refused: list[PresentedKey], console: Console) -> bool:
    for candidate in refused:
        console.write_stderr(
            f"error: {', '.join(candidate.nodes)}: host key {candidate.verdict.value}: {candidate.key.fingerprint}",
            f"hint: {explain_untrusted_key(candidate).hint}",
        )
    return bool(refused)


def _log_in(spec: ClusterSpec, hosts: Sequence[HostSpec], console: Console) -> None:
    """Log in with `ssh` to each node that asks questions, and keep the connections for other commands.

    Raises:
        NodesError: A login failed, or there is no terminal for the answers.
    """
    transport = OpenSshTransport(spec.ssh, PreDialer())
    errors: list[NodeError] = []
    for host in (host for host in hosts if host.transport is TransportKind.SSH):
        try:
            _log_in_to(transport, host, console)
        except NodeError as error:
            errors.append(error)
    if errors:
        raise NodesError(errors)


def _log_in_to(transport: OpenSshTransport, host: HostSpec, console: Console) -> None:
    try:
        transport.open(host).close()
    except AuthError as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            text = f"{str(error).removeprefix(f'{host.name}: ')}, and there is no terminal for the answer"
            raise AuthError(host.name, text, hint="type `clusterctl trust --login` at a terminal") from error
        console.write_stderr(f"{host.name}: `ssh` now asks for the password or code, once for all commands and runs")
        transport.log_in(host)
    console.write_stderr(f"{host.name}: logged in")
