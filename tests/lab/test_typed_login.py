"""Nodes that ask for a password and a code: typed once, at a terminal, before anything starts."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.transport import openssh
from tests.compiled import compiled
from tests.documented import typed
from tests.e2e.terminal import Terminal
from tests.lab.head_cli import Head
from tests.lab.logins import LOGINS, SECRET, Scene
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab

LOGIN = LOGINS["second factor"]
pytestmark = pytest.mark.skipif(bool(LOGIN.missing), reason=f"there is no {', '.join(LOGIN.missing)} here")


@pytest.fixture
def scene(lab: Lab, nodes: NodeFactory, head_env: dict[str, str], tmp_path: Path) -> Iterator[Scene]:
    """Two nodes that ask; nobody but a person answers."""
    both = nodes([LOGIN.specs[0]] * 2)
    with contextlib.ExitStack() as ends:
        for node in both:
            made = Scene(lab, tmp_path, node, dict(head_env), ends)
            LOGIN.prepare(made)
        made.env = {k: v for k, v in made.env.items() if not k.startswith("SSH_")}
        before = set(openssh.get_control_folder().glob("*"))
        yield made
        for socket in set(openssh.get_control_folder().glob("*")) - before:
            argv = ["ssh", "-O", "exit", "-S", str(socket), "any"]
            subprocess.run(argv, env=made.env, check=False, capture_output=True)


@pytest.fixture
def head(scene: Scene) -> Head:
    head = Head(scene.folder, scene.env)
    head.write({node.name: 1 for node in scene.lab.nodes}, {"command": ["true"]}, ssh={"connect_timeout": "60s"})
    return head


def code(number: int) -> str:
    argv = ["oathtool", "-c", str(number), SECRET]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def test_without_a_terminal_one_error_names_all_nodes_and_the_way(head: Head) -> None:
    done = head.run("trust", "--login")
    assert done.returncode == 4
    assert done.stderr.count("there is no terminal for the answer") == 1, done.stderr
    assert "n[1-2]" in done.stderr
    assert "hint: type `clusterctl trust --login` at a terminal" in done.stderr
    asked = head.run("exec", "--", "true")
    assert asked.returncode == 4
    assert "clusterctl trust --login" in asked.stderr


def log_in(scene: Scene, head: Head, env: dict[str, str]) -> None:
    first, second = scene.lab.nodes
    with Terminal(*typed("clusterctl trust --login"), folder=head.folder, env=env) as terminal:
        for node in (first, second):
            terminal.expect(f"{node.name}: `ssh` now asks")
            wait_for(
                lambda node=node: terminal.shown.count("Password: ") == 1 + (node is second),
                what="the question for a password",
            )  # type: ignore[misc]
            terminal.press("secret\n")
            wait_for(lambda node=node: terminal.shown.count("One-time") == 1 + (node is second), what="that for a code")  # type: ignore[misc]
            assert node is second or f"{second.name}: `ssh`" not in terminal.shown
            terminal.press(f"{code(0)}\n")
            terminal.expect(f"{node.name}: logged in")
        assert terminal.wait() == 0, terminal.shown


def test_what_a_node_asks_for_is_typed_once_at_a_terminal_for_all_that_follows(scene: Scene, head: Head) -> None:
    # Another login of the same person, by cron or `su`, has no such folder or another one.
    log_in(scene, head, {**head.env, "XDG_RUNTIME_DIR": str(scene.folder)})
    for arguments in (("exec", "--", "true"), ("exec", "--set", "ssh.client=openssh", "--", "true")):
        done = head.run(*arguments)
        assert done.returncode == 0, done.stderr
    done = head.run("up", "--no-health")
    assert done.returncode == 0, done.stderr
    for node in scene.lab.nodes:
        assert node.sshd_log().count("Accepted keyboard-interactive") == 1


def test_a_login_is_not_shared_once_ssh_config_leads_elsewhere_or_trusts_others(scene: Scene, head: Head) -> None:
    log_in(scene, head, head.env)
    first, second = scene.lab.nodes
    before = scene.lab.ssh_config.read_text()

    def machine(*lines: str) -> str | None:
        """Return which machine the first node is to ssh_config with those lines, as long as nobody types anything."""
        scene.lab.ssh_config.write_text("".join(f"Host {first.name}\n    {line}\n" for line in lines) + before)
        done = head.run("exec", "--nodes", first.name, "--set", "ssh.client=openssh", "--", "cat", "/etc/hostname")
        assert done.returncode in (0, 4), done.stderr
        return done.stdout.strip().rpartition(" ")[2] if done.returncode == 0 else None

    assert machine() == first.name
    assert machine(f"HostName {second.address}") == second.name
    for line in ("UserKnownHostsFile /dev/null", "User nobody", f"ProxyJump {second.name}"):
        assert machine(line) is None, line
    assert machine("ConnectTimeout 7") == first.name


def test_a_login_outlives_the_terminal_also_where_it_leaves_it_late(scene: Scene, head: Head) -> None:
    library = "libslow_daemon.so"
    folder = compiled(Path(__file__).with_name("slow_daemon.c"), library, "-shared", "-fPIC")
    log_in(scene, head, {**head.env, "LD_PRELOAD": str(folder / library)})
    done = head.run("exec", "--", "true")
    assert done.returncode == 0, done.stderr
