"""Reaching nodes by real SSH: the contract of sessions, logins of every kind, one readable line for each failure."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.protocol.command_messages import Command
from clusterctl.config.spec import HostSpec, SshSpec, TransportKind
from clusterctl.errors import AgentError, AuthError, ConnectError, HostKeyError, NodeError, NoPythonError
from clusterctl.session.connect import Transports, open_session, open_sessions
from clusterctl.session.controller_inbox import InboxItem, SessionLost
from clusterctl.session.node_session import Session
from clusterctl.transport.ssh.host_keys import add_to_known_hosts, fetch_host_keys
from clusterctl.transport.ssh.known_hosts import HostKeyVerdict
from clusterctl.transport.ssh.login_errors import LoginRefusedError
from clusterctl.transport.ssh.login_keys import AGENT_ONLY
from clusterctl.transport.ssh.paramiko_transport import SshTransport
from tests.contract_sessions import DEADLINE, Reach, SessionContract, next_of, standin_bundle
from tests.lab.keys import make_key
from tests.lab.spec import NOISE, NodeSpec
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab
    from tests.lab.node import Node

    Open = Callable[..., Session]

TOO_OLD = """#!/bin/sh
printf '\\nclusterctl:%s:old 3.6.8 /usr/local/bin/python3\\n' "$6"
exit 77
"""


def host_of(node: Node, **options: Any) -> HostSpec:
    return HostSpec(name=node.name, host=node.name, **options)


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSH_AUTH_SOCK", "SSH_CONNECTION", "CLUSTERCTL_SSH_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module", autouse=True)
def _no_threads_left(lab: Lab) -> Iterator[None]:
    """Closed sessions and transports leave no thread behind (the lab could not leave its namespaces with one)."""
    yield
    wait_for(lambda: threading.active_count() == 1, what=f"{threading.enumerate()} to end")


@pytest.fixture
def dial() -> Iterator[Open]:
    """Opens a session with the stand-in agent; all are closed afterwards."""
    opened: list[Session] = []
    transports: list[SshTransport] = []

    def make(host: HostSpec, inbox: Any = None, **spec: Any) -> Session:
        config = spec.pop("config_file", None)
        transports.append(SshTransport(SshSpec(**spec), config_file=config))
        inbox = queue.SimpleQueue() if inbox is None else inbox
        opened.append(open_session(transports[-1], host, inbox, bundle=standin_bundle()))
        return opened[-1]

    yield make
    for session in opened:
        session.close()
    for transport in transports:
        transport.close()


def failure(dial: Open, host: HostSpec, **spec: Any) -> NodeError:
    with pytest.raises(NodeError) as caught:
        dial(host, **spec)
    error = caught.value
    assert error.node == host.name
    assert "\n" not in str(error) + (error.hint or "")
    return error


class TestSsh(SessionContract):
    @pytest.fixture
    def reach(self, nodes: NodeFactory) -> Iterator[Reach]:
        (node,) = nodes()
        transport = SshTransport(SshSpec())
        yield transport, host_of(node)
        transport.close()


@pytest.mark.parametrize("noisy", [False, True], ids=["quiet", "noisy"])
@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/sh", "/usr/bin/tcsh", "/usr/bin/fish", "/usr/bin/zsh"])
def test_any_login_shell_leads_to_the_agent(nodes: NodeFactory, dial: Open, shell: str, noisy: bool) -> None:
    (node,) = nodes(1, shell=shell, noisy=noisy)
    text = "a'; echo foo $(id)\n\u2603"
    assert dial(host_of(node)).call(Command.RUNS, {"text": text})["echo"] == {"text": text}


def test_closing_leaves_nothing_on_the_node(nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes()
    session = dial(host_of(node))
    assert node.leftovers()
    session.close()
    wait_for(lambda: not node.leftovers(), what="the agent to end")


# --- failures


@pytest.mark.parametrize(
    ("spec", "error", "text", "hint"),
    [
        pytest.param(NodeSpec(python=None), AgentError, "no Python found", "install Python 3.9", id="no-python"),
        pytest.param(
            NodeSpec(python=None, programs={"python3": TOO_OLD}),
            AgentError,
            "no usable Python: `/usr/local/bin/python3` is Python 3.6.8",
            "install Python 3.9",
            id="old-python",
        ),
        pytest.param(NodeSpec(authorized=False), AuthError, "no key was accepted for user `root`", "copy-id", id="key"),
        pytest.param(
            NodeSpec(password="x", sshd=("PubkeyAuthentication no",)),
            AuthError,
            "no login by key, only by password",
            "PubkeyAuthentication yes",
            id="password-only",
        ),
        pytest.param(
            NodeSpec(password="x", sshd=("AuthenticationMethods publickey,password",)),
            AuthError,
            "accepted the key, but also asks for password",
            "AuthenticationMethods publickey",
            id="two-factor",
        ),
        pytest.param(
            NodeSpec(host_key="rsa", sshd=("HostKeyAlgorithms ssh-rsa",)),
            HostKeyError,
            "no host key of a type that is still accepted",
            "SHA-1 RSA only",
            id="sha1-rsa",
        ),
        pytest.param(
            NodeSpec(known=False),
            HostKeyError,
            "host key is not known: ssh-ed25519 SHA256:",
            "clusterctl trust",
            id="unknown",
        ),
        pytest.param(
            NodeSpec(host_certificate=True),
            HostKeyError,
            "only by @cert-authority in",
            "clusterctl trust",
            id="authority",
        ),
        pytest.param(
            NodeSpec(sshd=("ForceCommand echo members only",)),
            AgentError,
            "it said: 'members only'",
            "forced",
            id="forced",
        ),
        pytest.param(
            NodeSpec(shell="/usr/sbin/nologin"),
            AgentError,
            "This account is currently not available",
            "login",
            id="nologin",
        ),
        pytest.param(
            NodeSpec(sshd=("MaxSessions 0",)), ConnectError, "sshd opens no session", "MaxSessions", id="no-session"
        ),
        pytest.param(
            NodeSpec(
                authorized=False,
                sshd=("AuthorizedKeysCommand /usr/local/bin/killer", "AuthorizedKeysCommandUser root"),
                programs={"killer": "#!/bin/sh\nkill -9 $PPID\n"},
            ),
            ConnectError,
            "sshd closed the connection during the login",
            "restarting",
            id="killed-during-login",
        ),
    ],
)
def test_each_failure_is_one_line_with_a_remedy(
    nodes: NodeFactory, dial: Open, spec: NodeSpec, error: type[NodeError], text: str, hint: str
) -> None:
    (node,) = nodes([spec])
    found = failure(dial, host_of(node))
    assert isinstance(found, error)
    assert text in str(found)
    assert hint in (found.hint or "")
    wait_for(lambda: not node.leftovers(), what="nothing to be left")


def test_noise_of_a_node_without_python_is_not_its_fault(nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes(1, python=None, noisy=True)
    assert str(failure(dial, host_of(node))) == "no Python found"


def test_a_broken_login_script_is_quoted(nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes(1, noisy=True, files={".bashrc": f"echo '{NOISE}'; exit 3\n"})
    assert "do not panic" in str(failure(dial, host_of(node)))


def test_a_changed_host_key_is_refused_with_both_remedies(lab: Lab, nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes()
    node.new_host_key()
    error = failure(dial, host_of(node))
    assert "its host key has changed: it shows ssh-ed25519 SHA256:" in str(error)
    assert f"{lab.head.known_hosts}:1" in str(error)
    assert "ssh-keygen -R" in (error.hint or "")
    assert "changed" in str(failure(dial, host_of(node), host_keys="accept-new"))


def test_a_revoked_host_key_is_refused(lab: Lab, nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes()
    known = lab.head.known_hosts
    known.write_text(known.read_text() + "@revoked * " + known.read_text().split(maxsplit=1)[1])
    assert "@revoked" in str(failure(dial, host_of(node)))


def test_nobody_listening_is_told_from_a_name_that_is_none(nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes()
    assert str(failure(dial, host_of(node, port=2))) == "connection refused on port 2"
    unknown = failure(dial, HostSpec(name="x", host="no-such-host.invalid"))
    assert "host name cannot be resolved" in str(unknown)
    assert str(failure(dial, HostSpec(name="y", host="y", address="203.0.113.1"))) == "no route to host"


@pytest.mark.parametrize("how", ["cut", "stop_sshd"])
def test_a_node_that_does_not_answer_ends_within_the_time_limit(nodes: NodeFactory, dial: Open, how: str) -> None:
    (node,) = nodes()
    getattr(node, how)()
    before = time.monotonic()
    error = failure(dial, host_of(node), connect_timeout=1.5)
    assert time.monotonic() - before < 3.0
    assert {"cut": "no answer on port 22", "stop_sshd": "no answer from sshd"}[how] in str(error)


def test_a_key_with_a_passphrase_needs_an_agent(lab: Lab, nodes: NodeFactory, dial: Open, tmp_path: Path) -> None:
    (node,) = nodes()
    key = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", key], check=True)
    config = tmp_path / "config"
    config.write_text(f"IdentityFile {key}\nUserKnownHostsFile {lab.head.known_hosts}\n")
    host = host_of(node, address=node.address)
    error = failure(dial, host, config_file=str(config))
    assert f"the key {key} is protected by a passphrase and no ssh-agent holds it" in str(error)
    assert error.hint == f"run `ssh-add {key}`"


def test_all_failures_are_told_at_once_and_the_rest_join(nodes: NodeFactory) -> None:
    good, bad, worse = nodes([NodeSpec(), NodeSpec(authorized=False), NodeSpec(python=None)])
    transports = Transports(SshSpec())
    told: list[tuple[str, str]] = []
    sessions, errors = open_sessions(
        transports,
        [host_of(node) for node in (worse, good, bad)],
        queue.SimpleQueue(),
        bundle=standin_bundle(),
        progress=lambda node, stage: told.append((node, stage)),
    )
    for session in sessions.values():
        session.close()
    transports.close()
    assert list(sessions) == [good.name]
    assert {node: type(error) for node, error in errors.items()} == {
        worse.name: NoPythonError,
        bad.name: LoginRefusedError,
    }
    assert (good.name, "joined") in told


# --- logging in


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_every_type_of_key_logs_in(lab: Lab, nodes: NodeFactory, dial: Open, tmp_path: Path, kind: str) -> None:
    key = make_key(tmp_path / kind, kind)
    public = key.with_name(key.name + ".pub").read_text()
    (node,) = nodes(1, authorized=False, host_key=kind, files={".ssh/authorized_keys": public})
    assert dial(host_of(node, identity_file=str(key))).hello


def test_an_ssh_agent_logs_in(lab: Lab, nodes: NodeFactory, dial: Open, tmp_path: Path) -> None:
    socket = tmp_path / "agent"
    key = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", key], check=True)
    (node,) = nodes(1, authorized=False, files={".ssh/authorized_keys": (tmp_path / "locked.pub").read_text()})
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        wait_for(socket.exists, what="the ssh-agent")
        subprocess.run(["ssh-add", "-q", key], env=lab.head_env(SSH_AUTH_SOCK=str(socket)), check=True)
        key.unlink()
        config = tmp_path / "config"
        config.write_text(lab.ssh_config.read_text() + f"Host *\n  IdentityAgent {socket}\n")
        assert dial(host_of(node), config_file=str(config)).warnings == (AGENT_ONLY,)
    finally:
        agent.kill()
        agent.wait()


def test_a_user_certificate_logs_in(lab: Lab, nodes: NodeFactory, dial: Open, tmp_path: Path) -> None:
    (node,) = nodes(1, authorized=False, user_ca=True)
    key = make_key(tmp_path / "key")
    assert isinstance(failure(dial, host_of(node, identity_file=str(key))), AuthError)
    lab.certify(key)
    assert dial(host_of(node, identity_file=str(key))).hello


def test_the_cluster_file_s_user_and_port_win(lab: Lab, nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes(1, user="bob", port=2222)
    assert dial(host_of(node)).hello
    assert isinstance(failure(dial, host_of(node, user="root")), AuthError)
    assert isinstance(failure(dial, host_of(node, port=22)), ConnectError)


# --- trust


def test_hidden_names_and_ports_in_known_hosts_are_found(lab: Lab, nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes(1, port=2222)
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", lab.head.known_hosts], check=True, capture_output=True)
    assert node.address not in lab.head.known_hosts.read_text()
    assert dial(host_of(node)).hello


def test_accept_new_files_the_key_and_then_holds_to_it(lab: Lab, nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes(1, known=False)
    assert dial(host_of(node), host_keys="accept-new").warnings == ()
    assert dial(host_of(node)).hello
    assert lab.ssh(node, "true", "-o", "StrictHostKeyChecking=yes").returncode == 0


def test_no_checking_in_ssh_config_is_taken_as_accept_new(
    lab: Lab, nodes: NodeFactory, dial: Open, tmp_path: Path
) -> None:
    (node,) = nodes(1, known=False)
    config = tmp_path / "config"
    config.write_text("StrictHostKeyChecking no\n" + lab.ssh_config.read_text())
    assert "works as `accept-new`" in dial(host_of(node), config_file=str(config)).warnings[0]
    node.new_host_key("ecdsa")
    assert "has changed" in str(failure(dial, host_of(node), config_file=str(config)))


def test_trust_files_what_was_shown(lab: Lab, nodes: NodeFactory, dial: Open) -> None:
    first, second = nodes([NodeSpec(known=False), NodeSpec()])
    transport = SshTransport(SshSpec())
    hosts = [host_of(first), host_of(second), HostSpec(name="l", host="l", transport=TransportKind.LOCAL)]
    found, errors = fetch_host_keys(transport, hosts)
    assert errors == {}
    assert [(c.nodes, c.verdict) for c in found] == [
        ((first.name,), HostKeyVerdict.UNKNOWN),
        ((second.name,), HostKeyVerdict.TRUSTED),
    ]
    shown = lab.ssh(second, f"ssh-keyscan -t ed25519 {first.address} 2>/dev/null | ssh-keygen -lf -").stdout
    assert found[0].key.fingerprint in shown
    add_to_known_hosts([c for c in found if c.can_be_added])
    again, _ = fetch_host_keys(transport, hosts)
    assert {c.verdict for c in again} == {HostKeyVerdict.TRUSTED}
    assert dial(host_of(first)).hello


def test_a_changed_key_is_never_accepted(nodes: NodeFactory) -> None:
    (node,) = nodes()
    node.new_host_key()
    found, errors = fetch_host_keys(SshTransport(SshSpec()), [host_of(node)])
    assert errors == {}
    assert found[0].verdict is HostKeyVerdict.CHANGED
    with pytest.raises(ValueError, match="not to be accepted"):
        add_to_known_hosts(found)


# --- ways there


def test_many_nodes_behind_a_jump_host_share_one_connection_to_it(nodes: NodeFactory) -> None:
    gate, *inner = nodes([NodeSpec(name="gate"), *[NodeSpec(via="gate")] * 4])
    transports = Transports(SshSpec())
    hosts = [host_of(node) for node in inner]
    sessions, errors = open_sessions(transports, hosts, queue.SimpleQueue(), bundle=standin_bundle())
    try:
        assert errors == {}
        assert all(session.call(Command.RUNS)["echo"] == {} for session in sessions.values())
        assert gate.sshd_log().count("Accepted publickey") == 1
    finally:
        for session in sessions.values():
            session.close()
        transports.close()


def test_a_jump_host_that_fails_is_named(nodes: NodeFactory, dial: Open) -> None:
    gate, inner = nodes([NodeSpec(name="gate", sshd=("AllowTcpForwarding no",)), NodeSpec(via="gate")])
    assert str(failure(dial, host_of(inner))) == "jump host `gate` does not allow forwarding"
    gate.configure_sshd("AllowTcpForwarding yes")
    assert dial(host_of(inner)).hello
    assert "jump host `gate` cannot connect to the node" in str(failure(dial, host_of(inner, port=2)))
    gate.kill_sshd()
    assert str(failure(dial, host_of(inner))) == "jump host `gate`: connection refused on port 22"


def test_nodes_that_are_dead_behind_a_jump_host_take_no_other_with_them(nodes: NodeFactory) -> None:
    _, dead, *living = nodes([NodeSpec(name="gate"), *[NodeSpec(via="gate")] * 3])
    ports = range(1001, 1013)
    dead.firewall(*ports)
    hosts = [replace(host_of(dead, port=port), name=f"dead{port}") for port in ports]
    transports = Transports(SshSpec(connect_timeout=4.0))
    wanted = [*hosts, *map(host_of, living)]
    sessions, errors = open_sessions(transports, wanted, queue.SimpleQueue(), bundle=standin_bundle())
    for session in sessions.values():
        session.close()
    transports.close()
    assert list(sessions) == [node.name for node in living]
    assert {str(error) for error in errors.values()} == {"jump host `gate`: no answer from the node behind it"}


def test_the_key_of_a_jump_host_is_asked_for_first(nodes: NodeFactory, dial: Open) -> None:
    _, inner = nodes([NodeSpec(name="gate", known=False), NodeSpec(via="gate", known=False)])
    transport = SshTransport(SshSpec())
    names = []
    for _ in range(2):
        found, _ = fetch_host_keys(transport, [host_of(inner)])
        names.append(found[0].name)
        add_to_known_hosts(found)
    transport.close()
    assert names[1] == inner.address
    assert names[0] != names[1]
    assert dial(host_of(inner)).hello


def test_a_circle_of_jump_hosts_is_an_error(lab: Lab, nodes: NodeFactory, dial: Open, tmp_path: Path) -> None:
    first, second = nodes(2)
    config = tmp_path / "config"
    jumps = f"Host {first.name}\n  ProxyJump {second.name}\nHost {second.name}\n  ProxyJump {first.name}\n"
    config.write_text(jumps + lab.ssh_config.read_text())
    assert "form a cycle" in str(failure(dial, host_of(first), config_file=str(config)))


def test_a_proxy_command_is_run_and_ends_with_the_session(
    lab: Lab, nodes: NodeFactory, dial: Open, tmp_path: Path
) -> None:
    gate, inner = nodes([NodeSpec(name="gate"), NodeSpec(via="gate")])
    config = tmp_path / "config"
    command = f"ssh -F {lab.ssh_config} -W %h:%p {gate.name}"
    config.write_text(
        f"Host {inner.name}\n  HostName {inner.address}\n  ProxyCommand {command}\n" + lab.ssh_config.read_text()
    )
    session = dial(host_of(inner), config_file=str(config))
    assert session.hello
    session.close()
    wait_for(lambda: not inner.leftovers(), what="the agent to end")


def test_a_busy_sshd_is_asked_again_after_a_pause(nodes: NodeFactory) -> None:
    (node,) = nodes(1, sshd=("MaxStartups 2",))
    hosts = [replace(host_of(node), name=f"h{i}") for i in range(8)]
    transports = Transports(SshSpec(connect_timeout=30.0))
    sessions, errors = open_sessions(transports, hosts, queue.SimpleQueue(), bundle=standin_bundle(), answer_timeout=30)
    for session in sessions.values():
        session.close()
    assert {node: str(error) for node, error in errors.items()} == {}
    assert len(sessions) == 8


# --- losing a node


def test_a_cut_link_is_noticed_although_the_connection_looks_alive(nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes()
    inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
    session = dial(host_of(node), inbox)
    node.cut()
    waiting = session.call_async(Command.RUNS)
    before = time.monotonic()
    end = before + DEADLINE
    while time.monotonic() < end and session.alive:
        time.sleep(0.05)
    lost = next_of(inbox, SessionLost)
    assert "no sign of life for 15s" in str(lost.error)
    assert 10.0 < time.monotonic() - before < 18.0
    assert waiting.exception(DEADLINE) is lost.error


def test_a_node_that_dies_is_lost_at_once_or_by_silence(nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes()
    inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
    dial(host_of(node), inbox)
    node.kill_sshd()
    assert isinstance(next_of(inbox, SessionLost).error, NodeError)
