"""Opens sessions with many nodes in parallel and reports the stage that each node has reached."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import TypeVar, cast

from clusterctl.agent.protocol.command_messages import PROTOCOL_VERSION
from clusterctl.config.spec import HostSpec, SshSpec, TransportKind
from clusterctl.errors import AgentError, ClusterctlError, NodeError, NodeRefusedError, RefusedError
from clusterctl.session.controller_inbox import InboxItemQueue
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import HELLO
from clusterctl.transport.agent_archive import AgentArchive, load_agent_archive
from clusterctl.transport.bootstrap import Preamble, start_agent
from clusterctl.transport.fallback_to_openssh import FallbackTransport
from clusterctl.transport.interfaces import Channel, Transport
from clusterctl.transport.local import LocalTransport
from clusterctl.transport.openssh import OpenSshTransport
from clusterctl.transport.ssh.underlying_stream import PreDialer

E = TypeVar("E", bound=ClusterctlError)

AGENT_START_TIMEOUT_S = 20.0
"""The time limit in seconds for a shell to start the agent. Login scripts and disks without a cache may be slow."""


class Transports:
    """The transports of a command. Each transport is created at its first use: the import of the SSH client is slow.

    Args:
        ssh: The section `ssh` of the cluster file.
    """

    def __init__(self, ssh: SshSpec | None = None) -> None:
        self._ssh_spec = ssh or SshSpec()
        self._lock = threading.Lock()
        self._transports: dict[TransportKind, Transport] = {}
        self._predialer = PreDialer()

    def get_transport(self, host: HostSpec) -> Transport:
        """Return the transport for `host`."""
        built_in = host.transport is TransportKind.SSH and self._ssh_spec.client != "openssh"
        if built_in and TransportKind.SSH not in self._transports:
            # One thread imports the SSH client. Meanwhile the other threads open TCP connections.
            self._predialer.prefetch(host, self._ssh_spec.connect_timeout)
        with self._lock:
            # The local transport also runs `transport: {command: …}`, which is a child process like a local shell.
            kind = host.transport if isinstance(host.transport, TransportKind) else TransportKind.LOCAL
            if kind not in self._transports:
                self._transports[kind] = self._make(kind)
            return self._transports[kind]

    def close(self) -> None:
        """Close the resources that connections share. An open session continues unless it uses a jump host."""
        with self._lock:
            transports = list(self._transports.values())
        self._predialer.close()
        for transport in transports:
            transport.close()

    def _make(self, kind: TransportKind) -> Transport:
        if kind is TransportKind.LOCAL:
            return LocalTransport()
        openssh = OpenSshTransport(self._ssh_spec, self._predialer)
        if self._ssh_spec.client == "openssh":
            return openssh
        # paramiko imports `invoke` for its own ssh_config reader, which clusterctl does not use. This import takes a
        # third of paramiko's import time.
        with _hide_module("invoke"):
            from clusterctl.transport.ssh.paramiko_transport import SshTransport

        builtin = SshTransport(self._ssh_spec, predialer=self._predialer)
        return builtin if self._ssh_spec.client == "builtin" else FallbackTransport(builtin, openssh, self._predialer)


@contextlib.contextmanager
def _hide_module(module: str) -> Iterator[None]:
    """A context in which every import of an optional module fails, as if the module were not installed."""
    modules = cast("dict[str, ModuleType | None]", sys.modules)
    absent = modules.setdefault(module, None) is None
    try:
        yield
    finally:
        if absent:
            del modules[module]


def open_session(
    transport: Transport,
    host: HostSpec,
    inbox: InboxItemQueue,
    *,
    bundle: AgentArchive | None = None,
    epoch: int | None = None,
    answer_timeout: float = AGENT_START_TIMEOUT_S,
    progress: Callable[[str], None] = lambda _stage: None,
) -> Session:
    """Connect to `host`, start the agent on this host and exchange the handshake.

    Raises:
        NodeError: The connection, the check of the host key, the login or the start of the agent fails.
    """
    began = time.monotonic()
    try:
        channel, preamble, rest = _start_agent(transport, host, bundle, answer_timeout, progress)
    except AgentError as error:
        if not isinstance(transport, FallbackTransport) or not transport.switch_to_openssh(host, error):
            raise
        channel, preamble, rest = _start_agent(transport, host, bundle, answer_timeout, progress)
    session = Session(host.name, channel, preamble, inbox, epoch=epoch)
    session.start(rest)
    try:
        _handshake(session, answer_timeout)
    except BaseException:
        session.close()
        raise
    session.connect_s = time.monotonic() - began
    progress("joined")
    return session


def _start_agent(
    transport: Transport, host: HostSpec, bundle: AgentArchive | None, timeout: float, progress: Callable[[str], None]
) -> tuple[Channel, Preamble, bytes]:
    channel = transport.open(host, progress=progress)
    try:
        preamble, rest = start_agent(
            host.name,
            channel,
            bundle or load_agent_archive(),
            timeout=timeout,
            extra_pythons=(host.python,) if host.python else (),
            preferred_pythons=(sys.executable,) if host.transport is TransportKind.LOCAL else (),
            progress=progress,
        )
    except BaseException:
        channel.close()
        raise
    return channel, preamble, rest


def _handshake(session: Session, timeout: float) -> None:
    """Ask the agent for the facts of its node and check its protocol version.

    Raises:
        NodeError: The agent does not answer, or uses another protocol version.
    """
    node = session.node
    try:
        session.hello = HELLO.call(session, {}, timeout=timeout)
        spoken = session.hello.get("protocol", PROTOCOL_VERSION)
        if spoken != PROTOCOL_VERSION:
            text = f"its agent uses protocol {spoken}, this clusterctl uses protocol {PROTOCOL_VERSION}"
            raise AgentError(node, text, hint="use one version of clusterctl for all commands on a run")
    except RefusedError as error:
        raise NodeRefusedError(node, str(error).removeprefix(f"{node}: "), hint=error.hint) from error
    except NodeError:
        raise
    except ClusterctlError as error:
        raise AgentError(node, f"its agent does not answer: {error}", hint=error.hint) from error


def open_sessions(
    transports: Transports,
    hosts: Iterable[HostSpec],
    inbox: InboxItemQueue,
    *,
    bundle: AgentArchive | None = None,
    epoch: int | None = None,
    parallel: int = 64,
    answer_timeout: float = AGENT_START_TIMEOUT_S,
    progress: Callable[[str, str], None] = lambda _node, _stage: None,
    on_open: Callable[[Session], None] = lambda _session: None,
) -> tuple[dict[str, Session], dict[str, NodeError]]:
    """Open a session with every host, `parallel` at a time. Return the sessions, and the errors of all other hosts.

    The keys of both results are nodes, in the order of `hosts`. Any thread may call `progress` with a node and its
    stage ("connected, looking for Python"). A pool thread calls `on_open` with each session as soon as the session is
    open. Ctrl-C closes every open session.
    """

    def attempt(host: HostSpec) -> Session:
        progress(host.name, "connecting")
        session = open_session(
            transports.get_transport(host),
            host,
            inbox,
            bundle=bundle,
            epoch=epoch,
            answer_timeout=answer_timeout,
            progress=lambda stage: progress(host.name, stage),
        )
        try:
            on_open(session)
        except BaseException:
            session.close()
            raise
        return session

    return open_in_parallel(hosts, attempt, parallel, NodeError)


def open_in_parallel(
    hosts: Iterable[HostSpec], open_one: Callable[[HostSpec], Session], parallel: int, error_type: type[E]
) -> tuple[dict[str, Session], dict[str, E]]:
    """Open a session with every host. Return the sessions, and the errors of all other hosts.

    The keys of both results are nodes, in the order of `hosts`. An exception of another type (Ctrl-C) closes all
    sessions. A session that another thread is still opening is closed as soon as it is open.

    Args:
        hosts: The hosts to connect to.
        open_one: A function that opens one session. A pool thread calls this function.
        parallel: The maximum number of sessions that are opened at the same time.
        error_type: The type of the errors that concern one node only.
    """

    def attempt(host: HostSpec) -> Session | E:
        try:
            return open_one(host)
        except error_type as error:
            return error

    wanted = list(hosts)
    pool = ThreadPoolExecutor(max(1, min(parallel, len(wanted))), thread_name_prefix="connect")
    attempts = [pool.submit(attempt, host) for host in wanted]
    try:
        outcomes = {host.name: future.result() for host, future in zip(wanted, attempts, strict=True)}
    except BaseException:
        for future in attempts:
            future.cancel()
            future.add_done_callback(_close_late)
        raise
    finally:
        pool.shutdown(wait=False)
    errors = {node: outcome for node, outcome in outcomes.items() if isinstance(outcome, error_type)}
    return {node: outcome for node, outcome in outcomes.items() if not isinstance(outcome, ClusterctlError)}, errors


def _close_late(future: Future[Session | E]) -> None:
    if not future.cancelled() and not future.exception():
        outcome = future.result()
        if not isinstance(outcome, ClusterctlError):
            outcome.close()
