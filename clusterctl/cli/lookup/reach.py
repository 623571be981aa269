"""Sessions for commands that talk to nodes without a controller: all at once, closed at the end."""

from __future__ import annotations

import contextlib
import os
import queue
from typing import TYPE_CHECKING, Any

from clusterctl.cli.lookup import commands
from clusterctl.render.live_view import WaitingLine
from clusterctl.run.nodes.fan_out import raise_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.errors import NodeError
    from clusterctl.render.console import Terminal
    from clusterctl.session.session import Session


@contextlib.contextmanager
def sessions_of(
    spec: ClusterSpec, hosts: Sequence[HostSpec], *, tell: Terminal | None = None
) -> Iterator[dict[str, Session]]:
    """Give a session with every host; `tell` is where it is said for whom is waited.

    Raises:
        NodeError, NodesError: Some cannot be had.
    """
    with reachable(spec, hosts, tell=tell) as (sessions, errors):
        raise_first(errors)
        yield sessions


@contextlib.contextmanager
def reachable(
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
        commands.refuse_unknown(hosts)
    from clusterctl.session.connect import Transports, open_sessions
    from clusterctl.transport.openssh import has_askpass

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
