"""What would do harm is refused before anything starts, and what only looks harmful is not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.lab.head_cli import Head
from tests.lab.spec import NodeSpec

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

FOREVER = {"command": ["sleep", "600"], "grace": "1s"}


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


def said(head: Head, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in head.run("logs", run, "--all-ranks", "--format", "json").stdout.splitlines()]


LOGIND = {
    "/run/systemd/system/here": "",
    "/run/systemd/sessions/here": "",
    "/run/systemd/logind.conf.d/site.conf": "[Login]\nKillUserProcesses=yes\n",
}


def test_a_node_that_ends_processes_at_logout_is_refused_until_the_user_lingers(nodes: NodeFactory, head: Head) -> None:
    plain, killing = nodes([NodeSpec(), NodeSpec(user="ann", files=LOGIND)])
    head.write({plain.name: 1, killing.name: 1}, {"command": ["echo", "hello"]})

    refused = head.run("up", "--no-health")
    killing.run(["mount", "-t", "tmpfs", "tmpfs", "/var/lib"], check=True)
    killing.run(["mkdir", "-p", "/var/lib/systemd/linger/ann"], check=True)
    done = head.run("up", "--no-health")

    assert refused.returncode == 6, refused.stderr
    assert f"{killing.name}: logind ends all processes of ann" in refused.stderr
    assert "`loginctl enable-linger ann`" in refused.stderr
    assert done.returncode == 0, done.stderr


def state_on(node: Node, options: str) -> None:
    """Give a node a file system of its own for what it keeps of runs."""
    node.run(["mkdir", "-p", "/root/.local/state"], check=True)
    node.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", "/root/.local/state"], check=True)


def test_a_node_whose_state_has_no_place_is_refused_by_name(nodes: NodeFactory, head: Head) -> None:
    fine, made = nodes(2)
    state_on(made, "ro")
    head.write({fine.name: 1, made.name: 1}, FOREVER)

    refused = head.run("up", "--no-health")

    assert refused.returncode == 6, refused.stderr
    assert made.name in refused.stderr
    assert "Read-only file system" in refused.stderr
    assert "XDG_STATE_HOME" in refused.stderr
    assert not fine.pids_of("^sleep 600")


def test_a_node_whose_state_lies_where_no_program_may_run_works(nodes: NodeFactory, head: Head) -> None:
    (made,) = nodes(1)
    state_on(made, "noexec")
    (head.folder / "train.py").write_text("import sys\nprint('watched:', '_clusterctl_shim' in sys.modules)\n")
    head.write({made.name: 1}, {"script": "train.py"})

    done = head.run("up", "--no-health")

    assert done.returncode == 0, done.stderr
    assert "watched: True" in done.stdout


def test_a_forwarded_ssh_agent_alone_is_warned_of(
    nodes: NodeFactory, head: Head, tmp_path: Path, head_env: dict[str, str]
) -> None:
    """The agent's socket belongs to a process named sshd, as that of a forwarded one does."""
    (made,) = nodes(1)
    key = next(Path(head_env["HOME"], ".ssh").glob("id_*[!b]"))
    sshd = tmp_path / "sshd"
    sshd.symlink_to("/usr/bin/ssh-agent")
    socket = tmp_path / "agent"
    agent = subprocess.Popen([str(sshd), "-D", "-a", str(socket)], stdout=subprocess.DEVNULL, env=dict(head_env))
    try:
        made.wait_for(socket.exists, what="the ssh-agent")
        env = {**head_env, "SSH_AUTH_SOCK": str(socket), "SSH_CONNECTION": "192.0.2.1 5 192.0.2.2 22"}
        subprocess.run(["ssh-add", "-q", str(key)], env=env, check=True)
        hidden = key.rename(tmp_path / "hidden")
        try:
            forwarded = Head(head.folder, env)
            forwarded.write({made.name: 1}, {"command": ["echo", "hello"]})
            done = forwarded.run("up", "--no-health")
        finally:
            hidden.rename(key)
    finally:
        agent.terminate()
        agent.wait()

    assert done.returncode == 0, done.stderr
    assert "only a forwarded ssh-agent has the accepted key: reconnecting will fail once this login ends" in done.stderr


def test_nodes_of_one_host_name_and_home_and_a_head_that_is_a_node_never_collide(
    nodes: NodeFactory, head: Head
) -> None:
    made = nodes(2, shared_home=True)
    for node in made:
        node.run(["hostname", "same"], check=True)
    own = {"host": "head", "transport": "local", "workers": 1}
    hosts = [{"host": n.name, "gpus": 0, "workers": 1} for n in made] + [{**own, "gpus": 0}, {**own, "gpus": 0}]
    job = {"command": 'echo "$(hostname) $RANK $LOCAL_RANK"', "grace": "1s"}
    document = {"version": 1, "name": "mixed", "hosts": hosts, "job": job}
    (head.folder / "cluster.yaml").write_text(yaml.safe_dump(document))

    done = head.run("up", "--no-health", "--all-ranks")

    assert done.returncode == 0, done.stderr
    run = head.newest()
    found = {(entry["node"], entry["text"]) for entry in said(head, run)}
    here = os.uname().nodename
    expected = {
        (made[0].name, "same 0 0"),
        (made[1].name, "same 1 0"),
        ("head.0", f"{here} 2 0"),
        ("head.1", f"{here} 3 0"),
    }
    assert found == expected
