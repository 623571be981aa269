"""Sessions through a command of the cluster file, here one that ends in a shell on this machine."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.agent.protocol.command_messages import Command
from clusterctl.config.sections import hostfiles_and_slurm
from clusterctl.config.spec import HostSpec
from clusterctl.errors import ConnectError, NodeError
from clusterctl.session.connect import Transports, open_session
from clusterctl.session.controller_inbox import InboxItem, SessionLost
from clusterctl.transport.local import LocalTransport, build_command_argv
from tests.contract_sessions import DEADLINE, Reach, SessionContract, next_of, standin_bundle
from tests.lab.waiting import wait_for


def host_of(*argv: str, **more: object) -> HostSpec:
    return HostSpec(name="box", host="box", transport=argv, **more)  # type: ignore[arg-type]


def shell_in(home: Path) -> HostSpec:
    return host_of("env", f"HOME={home}", f"XDG_CACHE_HOME={home}/.cache", "CLUSTERCTL_BOX={host}", "/bin/sh")


class TestCommand(SessionContract):
    @pytest.fixture
    def reach(self, tmp_path: Path) -> Reach:
        return LocalTransport(), shell_in(tmp_path)


class TestRelayed(SessionContract):
    """Through a process that only hands on, as `docker exec` and `kubectl exec` do."""

    @pytest.fixture
    def reach(self, tmp_path: Path) -> Reach:
        inner = " ".join(shell_in(tmp_path).transport)  # type: ignore[arg-type]
        return LocalTransport(), host_of("/bin/sh", "-c", f"cat | {inner} | cat")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may enter namespaces")
class TestNamespace(SessionContract):
    """By the program with which containers are entered; the namespaces are our own."""

    @pytest.fixture
    def reach(self, tmp_path: Path) -> Reach:
        return LocalTransport(), host_of("nsenter", "-t", str(os.getpid()), "-m", "-n", *shell_in(tmp_path).transport)  # type: ignore[arg-type]


def test_an_agent_that_ends_in_a_step_that_stays_is_missed_at_once() -> None:
    *_, stay = hostfiles_and_slurm.build_srun_command(1)
    inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
    host = host_of("/bin/sh", "-c", f"{stay}; exec sleep 600")
    session = open_session(LocalTransport(), host, inbox, bundle=standin_bundle())
    session.post(Command.EVIDENCE)
    assert "RuntimeError: something broke" in str(next_of(inbox, SessionLost).error)


def test_hosts_with_a_command_are_reached_by_it(tmp_path: Path) -> None:
    assert isinstance(Transports().get_transport(shell_in(tmp_path)), LocalTransport)


def test_host_user_and_port_are_filled_in_and_nothing_is_filled_in_twice() -> None:
    host = host_of("tsh", "ssh", "-p", "{port}", "{user}@{host}", address="10.0.0.7", user="alice", port=22)
    assert build_command_argv(host) == ["tsh", "ssh", "-p", "22", "alice@10.0.0.7"]


def test_a_user_that_the_file_does_not_say_is_asked_for() -> None:
    with pytest.raises(
        ConnectError, match=r"its `transport` command contains `\{user\}`, but the cluster file does not set it"
    ):
        build_command_argv(host_of("tsh", "ssh", "{user}@{host}"))


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"address": "$(id)"}, id="address"),
        pytest.param({"address": "-x"}, id="option"),
        pytest.param({"user": "a;id"}, id="user"),
    ],
)
def test_no_value_that_came_past_the_file_is_put_into_a_command(values: dict[str, str]) -> None:
    with pytest.raises(ConnectError, match="characters that are not allowed in a command"):
        build_command_argv(host_of("sh", "-c", "echo {host}", **values))


def test_an_error_tells_what_the_command_said() -> None:
    host = host_of("/bin/sh", "-c", "echo no such container: {host} >&2; exit 1")
    with pytest.raises(NodeError, match="no such container: box"):
        open_session(LocalTransport(), host, queue.SimpleQueue(), bundle=standin_bundle(), answer_timeout=DEADLINE)


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(ConnectError, match="`no-such-program` cannot be started"):
        LocalTransport().open(host_of("no-such-program", "{host}"))


def test_what_a_stopped_command_has_not_taken_never_arrives(tmp_path: Path) -> None:
    arrived, pid = tmp_path / "arrived", tmp_path / "pid"
    channel = LocalTransport().open(host_of("/bin/sh", "-c", f"echo $$ >{pid}; echo; exec cat >{arrived}"))
    assert channel.recv(1, timeout=DEADLINE) == b"\n"
    relay = int(pid.read_text())
    os.kill(relay, signal.SIGSTOP)
    wait_for(
        lambda: Path(f"/proc/{relay}/stat").read_text().rpartition(")")[2].split()[0] == "T", what="a stopped command"
    )
    channel.send(b"a fence", timeout=DEADLINE)
    channel.close()
    wait_for(lambda: not Path(f"/proc/{relay}").exists(), what="its end")
    assert not arrived.exists() or arrived.read_bytes() == b""


def test_the_command_ends_with_a_head_that_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = (
        "import sys; from clusterctl.config.spec import HostSpec; from clusterctl.transport.local import *\n"
        "host = HostSpec(name='box', host='box', transport=('/bin/sh', '-c', sys.argv[1]))\n"
        "channel = LocalTransport().open(host); channel.recv(1); print(flush=True); channel.recv(1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, f"echo $$ >{pid}; echo; exec cat"], stdout=subprocess.PIPE
    ) as head:
        assert head.stdout is not None
        assert head.stdout.readline() == b"\n"
        head.kill()
    wait_for(lambda: not Path(f"/proc/{int(pid.read_text())}").exists(), what="its end")
