"""Logging in where `ssh` asks for something: at a terminal, one node at a time, once."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from clusterctl.config.spec import TransportKind
from clusterctl.errors import AuthError, NodeError, NodesError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.render.console import Console
    from clusterctl.transport.openssh import OpenSshTransport


def log_in(spec: ClusterSpec, hosts: Iterable[HostSpec], console: Console) -> None:
    """Let `ssh` ask for what each node needs that lets nobody in without; keep those logins to be shared.

    Raises:
        NodesError: Some could not be logged in to, or nobody is there to answer.
    """
    from clusterctl.transport.openssh import OpenSshTransport
    from clusterctl.transport.ssh.predial import PreDialer

    transport = OpenSshTransport(spec.ssh, PreDialer())
    errors: list[NodeError] = []
    for host in (host for host in hosts if host.transport is TransportKind.SSH):
        try:
            _one(transport, host, console)
        except NodeError as error:
            errors.append(error)
    if errors:
        raise NodesError(errors)


def _one(transport: OpenSshTransport, host: HostSpec, console: Console) -> None:
    try:
        transport.open(host).close()
    except AuthError as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            text = f"{str(error).removeprefix(f'{host.name}: ')}, and there is no terminal to answer at"
            raise AuthError(host.name, text, hint="type `clusterctl trust --login` at a terminal") from error
        console.narrate(f"{host.name}: `ssh` asks now for what it needs to log in; once, for all commands and runs")
        transport.log_in(host)
    console.narrate(f"{host.name}: logged in")
