"""Machines that have IPv6 addresses and no others."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.lab.head import BRIDGE, ip
from tests.lab.head_cli import Head

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab
    from tests.lab.node import Node

NETWORK = "fd00:c1::"
MEET = """\
import json, os, torch.distributed as dist, torch
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")
print(json.dumps({"total": total.item(), **{n: os.environ.get(n) for n in names}}), flush=True)
"""


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


@pytest.fixture
def head_address(lab: Lab) -> Iterator[None]:
    """The head is on the nodes' network by IPv6."""
    ip(f"address add {NETWORK}fe/64 dev {BRIDGE} nodad")
    yield
    ip(f"address delete {NETWORK}fe/64 dev {BRIDGE}")


@pytest.fixture
def made(nodes: NodeFactory, head_address: None) -> list[Node]:
    """Two nodes that can be reached by `NETWORK` alone; they have addresses of their link too, as machines do."""
    found = nodes(2, known=False, sshd=("ListenAddress ::",))
    for number, node in enumerate(found, 1):
        commands = [
            f"link set {node.interface} down",
            f"link set {node.interface} addrgenmode eui64 up",
            f"-4 address flush dev {node.interface}",
            f"address add {NETWORK}{number}/64 dev {node.interface} nodad",
        ]
        for command in commands:
            node.run(["ip", *command.split()], check=True)
    return found


@pytest.mark.torch
def test_the_ranks_of_a_run_meet_on_ipv6(made: list[Node], head: Head) -> None:
    (head.folder / "meet.py").write_text(MEET)
    head.write({n.name: 2 for n in made}, {"script": "meet.py"}, ssh={"host_keys": "accept-new"})
    at = [f"--set=hosts.{number - 1}.address={NETWORK}{number}" for number in (1, 2)]

    done = head.run("up", "-q", "--all-ranks", *at, timeout=200.0)

    assert done.returncode == 0, done.stderr
    run = head.newest()
    texts = [
        json.loads(line)["text"]
        for line in head.run("logs", run, "--all-ranks", "--format", "json").stdout.splitlines()
    ]
    said = [json.loads(text) for text in texts if text.startswith("{")]  # torch warns of names that it cannot look up
    assert [one["total"] for one in said] == [10.0] * 4
    assert {one["MASTER_ADDR"] for one in said} == {f"{NETWORK}1"}
    assert {one["GLOO_SOCKET_IFNAME"] for one in said} == {n.interface for n in made}


def test_a_host_is_its_address_to_ssh_to_known_hosts_and_as_a_jump_host(lab: Lab, made: list[Node], head: Head) -> None:
    one, other = f"{NETWORK}1", f"{NETWORK}2"
    head.write({one: 1, other: 1}, {"command": "true"})
    jump = f"--set=hosts.1.proxy_jump={one}"
    for _ in range(2):  # the key of a jump host has to be trusted before what is behind it shows its own
        assert head.run("trust", "-y", jump).returncode == 0

    done = head.run("exec", jump, "--", "echo", "here")

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{NETWORK}[1-2] (2)  here\n"
    assert f"Accepted publickey for root from {one}" in made[1].sshd_log()
    strict = ["ssh", "-F", str(lab.ssh_config), "-o", "StrictHostKeyChecking=yes"]
    assert all(subprocess.run([*strict, host, "true"], check=False).returncode == 0 for host in (one, other))
