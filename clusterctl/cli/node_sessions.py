"""Opens sessions with nodes for commands that need no controller, and closes the sessions at the end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli import trusted_commands
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.errors import ConfigError, NodeError
from clusterctl.render.start_progress import WaitingLine
from clusterctl.run.nodes.fan_out import raise_first
from clusterctl.session.connect import Transports, open_sessions
from clusterctl.session.node_session import Session
from clusterctl.transport.openssh import has_askpass

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal


@contextlib.contextmanager
def open_all_sessions(
    spec: ClusterSpec, hosts: Sequence[HostSpec], *, progress: Terminal | None = None
) -> Iterator[dict[str, Session]]:
    """Yield a session with every host, by host name. `progress` shows which hosts have not answered yet.

    Raises:
        NodeError, NodesError: Hosts cannot be reached.
    """
    with open_reachable_sessions(spec, hosts, progress=progress) as (sessions, errors):
        raise_first(errors)
        yield sessions


@contextlib.contextmanager
def open_reachable_sessions(
    spec: ClusterSpec,
    hosts: Sequence[HostSpec],
    on_connected: Callable[[Session], None] = lambda _: None,
    *,
    is_started_run: bool = False,
    progress: Terminal | None = None,
    on_update: Callable[[], None] = lambda: None,
) -> Iterator[tuple[dict[str, Session], dict[str, NodeError]]]:
    """Yield a session with every reachable host, and the errors of the other hosts.

    Args:
        spec: The cluster of the hosts.
        hosts: The hosts to connect to.
        on_connected: A function that is called with each new session, in a separate thread.
        is_started_run: Whether the spec belongs to a started run, whose commands the user has already accepted.
        progress: The terminal that shows which hosts have not answered yet.
        on_update: A function that is called before each update of `progress`.

    Raises:
        RefusedError: The user has not accepted a command that connects to a host.
    """
    if not is_started_run:
        trusted_commands.refuse_unaccepted_commands(hosts)
    # A program that asks for a password may use this terminal, so clusterctl draws no progress on it.
    progress = None if has_askpass(os.environ) else progress

    transports = Transports(spec.ssh)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    names, limit = [host.name for host in hosts], spec.ssh.connect_timeout
    with WaitingLine(names, limit, progress, meanwhile=on_update) as waiting:
        sessions, errors = open_sessions(
            transports, hosts, inbox, parallel=spec.ssh.parallel, on_open=on_connected, progress=waiting.set_stage
        )
    try:
        yield sessions, errors
    finally:
        for session in sessions.values():
            session.close()
        transports.close()


def build_ad_hoc_spec(names: str) -> ClusterSpec:
    """Return a spec of the hosts that `-w` names; the user's ssh configuration says how to connect to them.

    Names are validated as in a cluster file, because ssh may pass them to a shell.

    Raises:
        click.BadParameter: A name is not a valid host name.
    """
    from clusterctl.config.loader import ClusterFileText, parse_cluster_file
    from clusterctl.config.sections.build_context import DiskFiles

    text = json.dumps({"version": 1, "name": "hosts", "hosts": names})
    source = ClusterFileText(path="-w", absolute_path=os.path.abspath("cluster.yaml"), content=text)
    try:
        return parse_cluster_file([source], environ=os.environ, files=DiskFiles()).spec
    except ConfigError as error:
        first = error.problems[0]
        raise click.BadParameter(first.text.removeprefix("hosts: "), param_hint="-w") from error
