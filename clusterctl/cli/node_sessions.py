"""Sessions with nodes for commands that need no controller; all are closed at the end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli import accepted_commands
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.errors import ConfigError, NodeError
from clusterctl.render.live_view import WaitingLine
from clusterctl.run.nodes.fan_out import raise_first
from clusterctl.session.connect import Transports, open_sessions
from clusterctl.session.session import Session
from clusterctl.transport.openssh import has_askpass

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal


@contextlib.contextmanager
def open_all_sessions(
    spec: ClusterSpec, hosts: Sequence[HostSpec], *, tell: Terminal | None = None
) -> Iterator[dict[str, Session]]:
    """Give a session with every host; `tell` is where it is said for whom is waited.

    Raises:
        NodeError, NodesError: Some cannot be had.
    """
    with open_reachable_sessions(spec, hosts, tell=tell) as (sessions, errors):
        raise_first(errors)
        yield sessions


@contextlib.contextmanager
def open_reachable_sessions(
    spec: ClusterSpec,
    hosts: Sequence[HostSpec],
    joined: Callable[[Session], None] = lambda _: None,
    *,
    of_run: bool = False,
    tell: Terminal | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[tuple[dict[str, Session], dict[str, NodeError]]]:
    """Give a session with every host that can be reached, and the errors of the others.

    Each session is given to `joined` as soon as it is there, in a thread of its own. What a run was started with
    (`of_run`) was run here before; the commands of a file are run if they were accepted.
    `tell` is where it is said for whom is waited; `meanwhile` is called before each time that it is.

    Raises:
        RefusedError: A command of the file was not.
    """
    if not of_run:
        accepted_commands.refuse_unaccepted_commands(hosts)
    # A program that answers for `ssh` may ask on this very terminal, and takes as long as a person does.
    tell = None if has_askpass(os.environ) else tell

    transports = Transports(spec.ssh)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    names, limit = [host.name for host in hosts], spec.ssh.connect_timeout
    with WaitingLine(names, limit, tell, meanwhile=meanwhile) as waiting:
        sessions, errors = open_sessions(
            transports, hosts, inbox, parallel=spec.ssh.parallel, joined=joined, progress=waiting.at
        )
    try:
        yield sessions, errors
    finally:
        for session in sessions.values():
            session.close()
        transports.close()


def build_host_spec(names: str) -> ClusterSpec:
    """Return the spec of a cluster of these hosts, which are reached as ssh knows them.

    The names are checked as those of a cluster file are: they reach ssh, and through its configuration a shell.

    Raises:
        click.BadParameter: One is no name of a host.
    """
    from clusterctl.config.loader import ClusterFileText, DiskFiles, parse_cluster_file

    text = json.dumps({"version": 1, "name": "hosts", "hosts": names})
    source = ClusterFileText(path="-w", absolute=os.path.abspath("cluster.yaml"), text=text)
    try:
        return parse_cluster_file([source], environ=os.environ, files=DiskFiles()).spec
    except ConfigError as error:
        first = error.problems[0]
        raise click.BadParameter(first.text.removeprefix("hosts: "), param_hint="-w") from error
