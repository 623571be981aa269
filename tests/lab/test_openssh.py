"""Reaching nodes by the user's own `ssh`: the contract of sessions, its failures, and what never arrives."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from clusterctl.config.spec import HostSpec, SshSpec
from clusterctl.errors import AuthError, ConnectError, HostKeyError, NodeError
from clusterctl.session.connect import open_session
from clusterctl.transport.openssh import OpenSshTransport
from clusterctl.transport.ssh.paramiko_transport import SshTransport
from clusterctl.transport.ssh.underlying_stream import PreDialer
from tests.contract_sessions import DEADLINE, Reach, SessionContract, standin_bundle
from tests.lab.spec import NodeSpec
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab
    from tests.lab.node import Node


def host_of(node: Node) -> HostSpec:
    return HostSpec(name=node.name, host=node.name)


def by_ssh(config: Path | None = None, **spec: object) -> OpenSshTransport:
    return OpenSshTransport(SshSpec(**spec), PreDialer(str(config) if config else None))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSH_AUTH_SOCK", "SSH_CONNECTION", "SSH_ASKPASS_REQUIRE", "CLUSTERCTL_SSH_CONFIG"):
        monkeypatch.delenv(name, raising=False)


class TestOpenSsh(SessionContract):
    @pytest.fixture
    def reach(self, nodes: NodeFactory) -> Reach:
        (node,) = nodes(1, noisy=True)
        return by_ssh(), host_of(node)


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/rbash", "/usr/bin/tcsh", "/usr/bin/fish", "/usr/bin/zsh"])
def test_any_login_shell_leads_to_the_agent_and_nothing_stays(nodes: NodeFactory, shell: str) -> None:
    (node,) = nodes(1, shell=shell)
    session = open_session(by_ssh(), host_of(node), queue.SimpleQueue(), bundle=standin_bundle())
    session.close()
    wait_for(lambda: not node.leftovers(), what="the agent to end")


def test_habits_of_an_ssh_config_do_not_disturb_the_stream(lab: Lab, nodes: NodeFactory, tmp_path: Path) -> None:
    (node,) = nodes()
    config = tmp_path / "config"
    habits = (
        "RequestTTY force\nRemoteCommand echo hello\nStdinNull yes\nSessionType none\nPermitLocalCommand yes\n"
        "LocalCommand echo local\nLocalForward 4711 localhost:22\nForwardAgent yes\nLogLevel QUIET\n"
    )
    config.write_text(habits + lab.ssh_config.read_text())
    session = open_session(by_ssh(config), host_of(node), queue.SimpleQueue(), bundle=standin_bundle())
    session.close()


@pytest.mark.parametrize("client", [OpenSshTransport, SshTransport])
def test_either_client_sends_the_variables_that_ssh_config_names(
    lab: Lab,
    nodes: NodeFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    client: type[OpenSshTransport | SshTransport],
) -> None:
    (node,) = nodes([NodeSpec(sshd=("AcceptEnv WANDB_* NCCL_DEBUG",))])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("NCCL_DEBUG", "of this machine")
    config = tmp_path / "config"
    config.write_text('SendEnv WANDB_* NCCL_*\nSetEnv NCCL_DEBUG="set here" REFUSED=1\n' + lab.ssh_config.read_text())
    transport = client(SshSpec(), predialer=PreDialer(str(config)))
    channel = transport.open(host_of(node))
    channel.send(b"env; echo end\n")
    heard = b""
    while b"\nend\n" not in heard:
        heard += channel.recv(65536, timeout=DEADLINE)
    channel.close()
    transport.close()
    told = {line for line in heard.decode().splitlines() if line.startswith(("WANDB", "NCCL", "REFUSED"))}
    assert told == {"WANDB_MODE=offline", "NCCL_DEBUG=set here"}


@pytest.mark.parametrize(
    ("spec", "error", "text", "hint"),
    [
        pytest.param(
            NodeSpec(authorized=False),
            AuthError,
            r"could not log in \(tried: publickey /\S+/id_ed25519 \(ED25519\); sshd takes: publickey\)",
            "ssh-copy-id root@",
            id="key",
        ),
        pytest.param(
            NodeSpec(password="x", sshd=("PubkeyAuthentication no",)),
            AuthError,
            r"\(tried: nothing; sshd takes: password\)",
            "answer it once at a terminal with `clusterctl trust --login`",
            id="password",
        ),
        pytest.param(NodeSpec(known=False), HostKeyError, "does not know its host key", "clusterctl trust", id="unknown"),
        pytest.param(NodeSpec(port=2222), ConnectError, "Connection refused", "ssh -v root@", id="refused"),
        pytest.param(NodeSpec(shell="/usr/sbin/nologin"), ConnectError, "not available", "forced", id="nologin"),
        pytest.param(
            NodeSpec(sshd=("ForceCommand sleep 60",)), ConnectError, "logged in, but no shell answered in time", "waits",
            id="silent",
        ),
    ],
)  # fmt: skip
def test_each_failure_is_one_line_with_a_remedy(
    lab: Lab, nodes: NodeFactory, spec: NodeSpec, error: type[NodeError], text: str, hint: str
) -> None:
    (node,) = nodes([spec])
    if spec.port != 22:
        lab.reach(node, (node.address, 22))
    with pytest.raises(error, match=text) as caught:
        by_ssh(connect_timeout=3.0).open(host_of(node))
    assert "\n" not in str(caught.value) + (caught.value.hint or "")
    assert hint in (caught.value.hint or "")


def test_a_changed_host_key_is_refused_even_where_ssh_config_checks_nothing(
    lab: Lab, nodes: NodeFactory, tmp_path: Path
) -> None:
    (node,) = nodes()
    node.new_host_key()
    config = tmp_path / "config"
    config.write_text("StrictHostKeyChecking no\n" + lab.ssh_config.read_text())
    with pytest.raises(HostKeyError, match="its host key has changed"):
        by_ssh(config).open(host_of(node))


# --- jump hosts


def behind_two(nodes: NodeFactory, **first: object) -> tuple[Node, Node, Node]:
    """Two jump hosts in a row, and a node behind them."""
    outer, middle, inner = nodes([NodeSpec(name="outer", **first), NodeSpec(name="middle"), NodeSpec(via="middle")])  # type: ignore[arg-type]
    return outer, middle, inner


def config_with(lab: Lab, folder: Path, *blocks: str) -> Path:
    """An ssh_config whose path and files a shell, and `ssh` itself, take for something else if nobody quotes them."""
    place = folder / "it's 100%d"
    place.mkdir()
    known = place / "known hosts"
    known.write_bytes(lab.head.known_hosts.read_bytes())
    text = lab.ssh_config.read_text().replace(str(lab.head.known_hosts), f'"{str(known).replace("%", "%%")}"')
    (place / "config").write_text("".join(f"{block}\n" for block in blocks) + text)
    return place / "config"


WAYS = {
    "by ssh_config": ({}, "Host n3\n  ProxyJump middle\nHost middle\n  ProxyJump outer"),
    "by ssh_config, in one line": ({}, "Host n3\n  ProxyJump outer,middle"),
    "by the cluster file": ({"proxy_jump": "outer,root@middle:22"}, "Host n3\n  ProxyJump none"),
}


@pytest.mark.parametrize(("more", "block"), WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_the_policy_for_host_keys_holds_for_every_jump_host(
    lab: Lab, nodes: NodeFactory, tmp_path: Path, policy: str, more: dict[str, str], block: str
) -> None:
    *_, inner = behind_two(nodes, known=False)
    config = config_with(lab, tmp_path, "StrictHostKeyChecking no", block)
    known = config.parent / "known hosts"
    before = known.read_text()
    host = HostSpec(name=inner.name, host=inner.name, **more)
    if policy == "strict":
        with pytest.raises(HostKeyError, match="does not know the key of a jump host"):
            by_ssh(config, host_keys=policy).open(host)
        assert known.read_text() == before
    else:
        by_ssh(config, host_keys=policy).open(host).close()
        assert len(known.read_text().splitlines()) == len(before.splitlines()) + 1


def test_the_known_hosts_of_the_cluster_file_speak_of_jump_hosts_too(nodes: NodeFactory, tmp_path: Path) -> None:
    gate, inner = nodes([NodeSpec(name="gate", known=False), NodeSpec(via="gate")])
    shown = gate.new_host_key()
    known = tmp_path / "100% known"
    known.write_text(f"{gate.address} {shown}")
    by_ssh(host_keys="strict", known_hosts=(str(known),)).open(host_of(inner)).close()


def test_a_circle_of_jump_hosts_is_an_error(lab: Lab, nodes: NodeFactory, tmp_path: Path) -> None:
    first, second = nodes(2)
    blocks = [f"Host {one.name}\n  ProxyJump {other.name}" for one, other in ((first, second), (second, first))]
    with pytest.raises(ConnectError, match="form a cycle"):
        by_ssh(config_with(lab, tmp_path, *blocks)).open(host_of(first))


# --- fences


def pid_of(node: Node) -> int:
    """The `ssh` of ours that leads to a node: another suite beside us has nodes of the same names."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if words and words[0] == "ssh" and node.name in words:
                return process.pid
    raise AssertionError(f"no `ssh` of ours leads to {node.name}")


def stop(pid: int) -> None:
    """Stop a process, which may still be running when the signal is sent."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="the process to stand still")


def unsent_to(node: Node) -> int:
    """Bytes that the kernel of the head still wants a node's sshd to have."""
    peer = socket.inet_aton(node.address)[::-1].hex().upper() + ":0016"
    lines = [line.split() for line in Path("/proc/thread-self/net/tcp").read_text().splitlines()]
    return sum(int(words[4].partition(":")[0], 16) for words in lines if words[2] == peer)


def test_what_a_stopped_ssh_has_not_taken_never_arrives(nodes: NodeFactory) -> None:
    (node,) = nodes()
    channel = by_ssh().open(host_of(node))
    channel.send(b"echo; exec cat >/root/arrived\n")
    assert channel.recv(1, timeout=DEADLINE) == b"\n"
    stop(pid_of(node))
    channel.send(b"a fence", timeout=DEADLINE)
    channel.close()
    wait_for(lambda: not node.leftovers(), what="the end of the shell")
    assert node.path("arrived").read_bytes() == b""


def test_what_a_link_that_was_cut_holds_back_never_arrives(nodes: NodeFactory) -> None:
    (node,) = nodes()
    channel = by_ssh().open(host_of(node))
    channel.send(b"echo; exec cat >/root/arrived\n")
    assert channel.recv(1, timeout=DEADLINE) == b"\n"
    ssh = pid_of(node)
    node.cut()
    channel.send(b"a fence", timeout=DEADLINE)
    wait_for(lambda: unsent_to(node), what="the kernel to hold what was sent")
    channel.close()
    wait_for(lambda: not Path(f"/proc/{ssh}").exists(), what="the end of ssh")
    assert unsent_to(node) == 0
    node.restore()
    node.kill_sshd()
    wait_for(lambda: not node.leftovers(), what="the end of the shell")
    assert node.path("arrived").read_bytes() == b""
