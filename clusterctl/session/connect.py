"""Opens sessions with many nodes in parallel and reports the stage of each."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Protocol, TypeVar, cast

from clusterctl.agent.protocol.command_messages import PROTOCOL_VERSION
from clusterctl.config.spec import HostSpec, SshSpec, TransportKind
from clusterctl.errors import AgentError, ClusterctlError, NodeError, NodeRefusedError, RefusedError
from clusterctl.session.controller_inbox import ItemQueue
from clusterctl.session.requests import HELLO
from clusterctl.session.session import Session
from clusterctl.transport.agent_archive import AgentArchive, load_agent_archive
from clusterctl.transport.base import Channel, Transport
from clusterctl.transport.bootstrap import Preamble, start_agent
from clusterctl.transport.fallback import FallbackTransport
from clusterctl.transport.local import LocalTransport
from clusterctl.transport.openssh import OpenSshTransport
from clusterctl.transport.ssh.underlying_stream import PreDialer

E = TypeVar("E", bound=ClusterctlError)

AGENT_START_TIMEOUT_S = 20.0
"""How long a shell may take to start the agent: login scripts and cold disks are slow."""


class Progress(Protocol):
    """Receives the stage of a node ("connected, looking for Python"). Called on any thread."""

    def __call__(self, node: str, stage: str) -> None:
        """Record that `node` is in `stage` now."""


class Transports:
    """The transports of a command, created on first use: importing SSH takes longer than most commands.

    Args:
        ssh: How connections are opened.
    """

    def __init__(self, ssh: SshSpec | None = None) -> None:
        self._ssh_spec = ssh or SshSpec()
        self._lock = threading.Lock()
        self._made: dict[TransportKind, Transport] = {}
        self._predialer = PreDialer()

    def get_transport(self, host: HostSpec) -> Transport:
        """Return the transport for `host`."""
        built_in = host.transport is TransportKind.SSH and self._ssh_spec.client != "openssh"
        if built_in and TransportKind.SSH not in self._made:
            # While one thread imports, the others dial.
            self._predialer.prefetch(host, self._ssh_spec.connect_timeout)
        with self._lock:
            # A command of the user is a child process, as a local shell is.
            kind = host.transport if isinstance(host.transport, TransportKind) else TransportKind.LOCAL
            if kind not in self._made:
                self._made[kind] = self._make(kind)
            return self._made[kind]

    def close(self) -> None:
        """Close what connections share. Open sessions go on unless they pass through a jump host."""
        with self._lock:
            made = list(self._made.values())
        self._predialer.close()
        for transport in made:
            transport.close()

    def _make(self, kind: TransportKind) -> Transport:
        if kind is TransportKind.LOCAL:
            return LocalTransport()
        openssh = OpenSshTransport(self._ssh_spec, self._predialer)
        if self._ssh_spec.client == "openssh":
            return openssh
        # paramiko's own ssh_config reader, which we do not use, imports `invoke` for `Match exec`: a third of the
        # import time.
        with _hide_module("invoke"):
            from clusterctl.transport.ssh.ssh import SshTransport

        builtin = SshTransport(self._ssh_spec, predialer=self._predialer)
        return builtin if self._ssh_spec.client == "builtin" else FallbackTransport(builtin, openssh, self._predialer)


@contextlib.contextmanager
def _hide_module(module: str) -> Iterator[None]:
    """Make an optional module look as if it were not installed."""
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
    inbox: ItemQueue,
    *,
    bundle: AgentArchive | None = None,
    epoch: int | None = None,
    answer_timeout: float = AGENT_START_TIMEOUT_S,
    progress: Callable[[str], None] = lambda _stage: None,
) -> Session:
    """Reach `host`, start the agent there and exchange the handshake.

    Raises:
        NodeError: The host cannot be reached, trusted, logged in to or used.
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
            pythons=(host.python,) if host.python else (),
            first=(sys.executable,) if host.transport is TransportKind.LOCAL else (),
            progress=progress,
        )
    except BaseException:
        channel.close()
        raise
    return channel, preamble, rest


def _handshake(session: Session, timeout: float) -> None:
    """Ask the node for its facts and check its protocol version.

    Raises:
        NodeError: The node does not answer, or speaks another protocol.
    """
    node = session.node
    try:
        session.hello = HELLO.call(session, {}, timeout=timeout)
        spoken = session.hello.get("protocol", PROTOCOL_VERSION)
        if spoken != PROTOCOL_VERSION:
            text = f"its agent speaks protocol {spoken}, this is {PROTOCOL_VERSION}"
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
    inbox: ItemQueue,
    *,
    bundle: AgentArchive | None = None,
    epoch: int | None = None,
    parallel: int = 64,
    answer_timeout: float = AGENT_START_TIMEOUT_S,
    progress: Progress = lambda _node, _stage: None,
    joined: Callable[[Session], None] = lambda _session: None,
) -> tuple[dict[str, Session], dict[str, NodeError]]:
    """Open a session with every host, `parallel` at a time. Return the sessions and the errors of the others.

    Both are by node, in the order of `hosts`. `joined` gets each session as soon as it is open, on a pool thread.
    Ctrl-C closes every session that was opened.
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
            joined(session)
        except BaseException:
            session.close()
            raise
        return session

    return open_in_parallel(hosts, attempt, parallel, NodeError)


def open_in_parallel(
    hosts: Iterable[HostSpec], open_one: Callable[[HostSpec], Session], parallel: int, expected: type[E]
) -> tuple[dict[str, Session], dict[str, E]]:
    """Open a session with every host, `parallel` at a time. Return the sessions and the errors of the others.

    Both are by node, in the order of `hosts`. Any other exception (Ctrl-C) closes all sessions; a session that is still
    being opened is closed as soon as it is open.

    Args:
        hosts: The hosts to connect to.
        open_one: Opens one session; called on a pool thread.
        parallel: How many at a time.
        expected: The error type that concerns its node alone.
    """

    def attempt(host: HostSpec) -> Session | E:
        try:
            return open_one(host)
        except expected as error:
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
    errors = {node: outcome for node, outcome in outcomes.items() if isinstance(outcome, expected)}
    return {node: outcome for node, outcome in outcomes.items() if not isinstance(outcome, ClusterctlError)}, errors


def _close_late(future: Future[Session | E]) -> None:
    if not future.cancelled() and not future.exception():
        outcome = future.result()
        if not isinstance(outcome, ClusterctlError):
            outcome.close()
