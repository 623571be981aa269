"""Logging in by an ssh-agent that answers, hangs, declines, or is gone by the time of the next login."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.spec import HostSpec, SshSpec
from clusterctl.errors import AuthError, ConnectError, NodeError
from clusterctl.session.connect import Transports, open_session, open_sessions
from clusterctl.transport.ssh.login_keys import AGENT_ONLY
from clusterctl.transport.ssh.paramiko_transport import SshTransport
from tests.contract_sessions import standin_bundle
from tests.lab.keys import make_key
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab
    from tests.lab.node import Node


class Agent:
    """An ssh-agent that holds one key."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "agent"
        self._process = subprocess.Popen(["ssh-agent", "-D", "-a", self.socket], stdout=subprocess.DEVNULL)
        wait_for(self.socket.exists, what="the ssh-agent")

    def add(self, key: Path, *options: str) -> None:
        environment = {**os.environ, "SSH_AUTH_SOCK": str(self.socket)}
        subprocess.run(["ssh-add", "-q", *options, key], env=environment, check=True)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    started = Agent(tmp_path)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(started.socket))
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    yield started
    started.end()


@pytest.fixture
def key(lab: Lab, tmp_path: Path) -> Path:
    """A key that the account's default files do not have."""
    return make_key(tmp_path / "key")


@pytest.fixture
def node(nodes: NodeFactory, key: Path) -> Node:
    """A node that lets only that key in."""
    public = key.with_name("key.pub").read_text()
    return nodes(1, authorized=False, files={".ssh/authorized_keys": public})[0]


@pytest.fixture
def transport() -> Iterator[SshTransport]:
    made = SshTransport(SshSpec())
    yield made
    made.close()


def log_in(transport: SshTransport, host: HostSpec) -> tuple[str, ...]:
    """Log in and out; return what a person should know of it."""
    session = open_session(transport, host, queue.SimpleQueue(), bundle=standin_bundle())
    session.close()
    return session.warnings


def host_of(node: Node, key: Path | None = None) -> HostSpec:
    return HostSpec(name=node.name, host=node.name, identity_file=str(key) if key else None)


def test_a_login_by_an_agent_alone_is_warned_of_and_one_that_a_file_could_do_is_not(
    node: Node, agent: Agent, key: Path, transport: SshTransport
) -> None:
    agent.add(key)
    assert log_in(transport, host_of(node, key)) == ()
    assert log_in(transport, host_of(node)) == (AGENT_ONLY,)
    key.unlink()
    assert log_in(transport, host_of(node, key)) == (AGENT_ONLY,)


def test_the_key_file_logs_in_once_the_agent_that_held_it_is_gone(
    node: Node, agent: Agent, key: Path, transport: SshTransport
) -> None:
    agent.add(key)
    log_in(transport, host_of(node, key))
    agent.end()
    log_in(transport, host_of(node, key))


def test_the_key_file_logs_in_where_the_agent_declines_to_sign(
    node: Node, agent: Agent, key: Path, transport: SshTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.add(key, "-c")
    log_in(transport, host_of(node, key))
    key.unlink()
    with pytest.raises(AuthError, match=r"no key was accepted .*, and the ssh-agent would not sign"):
        log_in(transport, host_of(node, key))


def test_an_agent_that_hangs_holds_up_all_nodes_once_and_together(node: Node, agent: Agent, key: Path) -> None:
    agent.add(key)
    agent.stop()
    transports = Transports(SshSpec())
    hosts = [replace(host_of(node, key), name=f"h{number}") for number in range(8)]
    before = time.monotonic()
    sessions, errors = open_sessions(transports, hosts, queue.SimpleQueue(), bundle=standin_bundle())
    assert time.monotonic() - before < 10.0
    for session in sessions.values():
        session.close()
    transports.close()
    assert {name: str(error) for name, error in errors.items()} == {}
    assert len(sessions) == 8


def test_a_key_replaced_on_disk_is_read_again(node: Node, key: Path, transport: SshTransport) -> None:
    log_in(transport, host_of(node, key))
    for path in (key, key.with_name("key.pub")):
        path.unlink()
    make_key(key)
    with pytest.raises(AuthError, match="no key was accepted"):
        log_in(transport, host_of(node, key))
    node.path("/root/.ssh/authorized_keys").write_text(key.with_name("key.pub").read_text())
    log_in(transport, host_of(node, key))


def test_a_login_that_takes_too_long_is_no_refusal(nodes: NodeFactory) -> None:
    slow = "#!/bin/sh\nsleep 60\n"
    lines = ("AuthorizedKeysCommand /usr/local/bin/slow", "AuthorizedKeysCommandUser root")
    (node,) = nodes(1, authorized=False, sshd=lines, programs={"slow": slow})
    transport = SshTransport(SshSpec(connect_timeout=2.0))
    with pytest.raises(NodeError, match="sshd did not answer the login in time") as caught:
        log_in(transport, host_of(node))
    transport.close()
    assert isinstance(caught.value, ConnectError)
