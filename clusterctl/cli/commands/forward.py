"""`clusterctl forward`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.cli.choices import together
from clusterctl.cli.interactive import ports
from clusterctl.cli.interactive.target import TargetChoices, target_of
from clusterctl.cli.lookup.reach import reachable
from clusterctl.cli.main import WithExamples
from clusterctl.config.spec import TransportKind
from clusterctl.errors import ExitCode, RefusedError
from clusterctl.run.nodes.fan_out import raise_first

if TYPE_CHECKING:
    import socket


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardChoices(TargetChoices):
    """What a person chose of `forward`."""

    wanted: tuple[str, ...]
    bind: str


@click.command("forward", cls=WithExamples)
@click.argument("wanted", metavar="PORT...", nargs=-1, required=True)
@click.option("--node", metavar="NODE", help="Whose ports; the first node of the file by default.")
@click.option(
    "--bind", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Where this machine waits for you."
)
@options.target_options
@options.output_options
@together(ForwardChoices)
def command(choices: ForwardChoices) -> int:
    """Let ports of a node be reached at this machine: TensorBoard, Jupyter, a debugger that waits.

    PORT is the same on both sides; HERE:PORT and HERE:ADDRESS:PORT name others (0 for any free one here). sshd
    there need not allow it: the bytes travel through the connection that clusterctl has. Ctrl-C ends it.
    """
    try:
        wanted = ports.parse(choices.wanted)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="PORT") from error
    console = choices.console()
    target = target_of(choices, console)
    node = target.host.name
    if target.host.transport is TransportKind.LOCAL and any(f.here == f.there and not f.beyond for f in wanted):
        raise RefusedError(f"{node} is this machine: its ports are here already", hint="HERE:PORT names another one")
    with contextlib.ExitStack() as stack:
        listening: dict[socket.socket, ports.Forward] = {}
        for forward in wanted:
            listening[stack.enter_context(ports.listen(choices.bind, forward.here))] = forward
        sessions, errors = stack.enter_context(reachable(target.spec, [target.host], of_run=target.rank is not None))
        raise_first(errors)
        for waiting, forward in listening.items():
            there = f"{forward.host} from {node}," if forward.beyond else node
            console.data(f"http://{_place(waiting)} is {there} port {forward.there}")
        if not choices.quiet:
            console.narrate("Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            ports.Ports(sessions[node], listening, lambda text: console.narrate(f"warning: {text}")).serve()
    return int(ExitCode.OK)


def _place(waiting: socket.socket) -> str:
    address, port = waiting.getsockname()[:2]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
