"""`clusterctl port-forward`."""

from __future__ import annotations

import ipaddress
import socket
import sys
from dataclasses import dataclass

import click

from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.commands.shell import find_shell_target, replace_process
from clusterctl.config.spec import TransportKind
from clusterctl.errors import RefusedError
from clusterctl.transport.openssh import OpenSshTransport
from clusterctl.transport.ssh.underlying_stream import PreDialer

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PortForward:
    """A port of this machine (0: any free port) and the host and port to which the node forwards connections."""

    local_port: int
    remote_port: int
    remote_host: str = _LOOPBACK


@click.command("port-forward", cls=CliCommand, reads_file=True)
@click.argument("ports", metavar="PORT...", nargs=-1, required=True)
@click.option("--node", metavar="NODE", help="Forward to this node; the first node of the file by default.")
@click.option(
    "--bind", metavar="ADDRESS", default=_LOOPBACK, show_default=True, help="Listen on this address of this machine."
)
@options.single_node_options
@click.pass_obj
def command(
    common: CommonOptions,
    *,
    node: str | None,
    host: str | None,
    rank: int | None,
    reference: str | None,
    ports: tuple[str, ...],
    bind: str,
) -> int:
    """Forward ports of this machine to a node, for example for TensorBoard, Jupyter or a debugger.

    PORT alone means the same port on this machine. HERE:PORT and HERE:ADDRESS:PORT name another local port (0: any free
    port). `port-forward` runs your own `ssh -N -L` with the host, user, port, key and jump hosts of the cluster file.
    Ctrl-C ends it.
    """
    try:
        forwards = [parse_forward(word) for word in ports]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="PORT") from error
    console = common.console()
    target = find_shell_target(common, node=node, host=host, rank=rank, reference=reference)
    name = target.host.name
    if target.host.transport is TransportKind.LOCAL:
        raise RefusedError(f"{name} is this machine, so its ports need no forwarding")
    if isinstance(target.host.transport, tuple):
        hint = "if the node runs sshd, use `ssh -L`"
        raise RefusedError(f"{name} is reached by a transport command, which cannot forward ports", hint=hint)
    addresses = [(bind, forward.local_port or _find_free_port(bind)) for forward in forwards]
    for address, forward in zip(addresses, forwards, strict=True):
        there = name if forward.remote_host == _LOOPBACK else f"{forward.remote_host} from {name},"
        console.write_stdout(f"http://{_format_endpoint(*address)} is {there} port {forward.remote_port}")
    if not common.quiet:
        console.write_stderr("Ctrl-C ends it")
    sys.stdout.flush()
    pairs = zip(addresses, forwards, strict=True)
    words = [
        f"{_format_endpoint(*address)}:{_format_endpoint(forward.remote_host, forward.remote_port)}"
        for address, forward in pairs
    ]
    replace_process(OpenSshTransport(target.spec.ssh, PreDialer()).build_forward_argv(target.host, words))


def _format_endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _find_free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as listener:
            port: int = listener.getsockname()[1]
            return port
    except OSError as error:
        raise RefusedError(f"cannot listen on {address}: {error.strerror or error}") from error


def parse_forward(word: str) -> PortForward:
    """Parse `[HERE:][HOST:]PORT`.

    Raises:
        ValueError: The word does not have this form.
    """
    here, colon, rest = word.partition(":")
    host, _, there = rest.rpartition(":") if colon else ("", "", here)
    try:
        ports = int(here), int(there)
    except ValueError:
        raise ValueError(f"`{word}` is not PORT, HERE:PORT or HERE:ADDRESS:PORT") from None
    if not (0 <= ports[0] <= 65535 and 0 < ports[1] <= 65535):
        raise ValueError(f"`{word}` has no port between 1 and 65535")
    host = host.removeprefix("[").removesuffix("]")
    if host in ("", "localhost"):
        return PortForward(*ports)
    try:
        return PortForward(*ports, str(ipaddress.ip_address(host)))
    except ValueError:
        raise ValueError(f"`{host}` in `{word}` is not an IP address; give an address instead of a name") from None
