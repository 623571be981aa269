"""Nodes that are hard to reach, a head that is not alone, and Pythons that lack something."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import locales, pythons
from tests.lab.agents import hung_agent
from tests.lab.head import ADDRESS6
from tests.lab.other_head import OTHER_ADDRESS, OtherHead
from tests.lab.places import Network
from tests.lab.spec import NodeSpec

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab

QUICK = ("-o", "ConnectTimeout=2", "-o", "ConnectionAttempts=1")
ADDRESSES = "ip -brief -4 address show scope global; ip -brief -6 address show scope global"


def test_nodes_have_ipv6_and_no_ipv4(lab: Lab, nodes: NodeFactory) -> None:
    first, second, plain = nodes([NodeSpec(ipv6_only=True, names=True)] * 2 + [NodeSpec()])
    seen = lab.ssh(first, f"{ADDRESSES}; echo $SSH_CONNECTION; ip -4 route").stdout.split()
    assert seen[2] == f"{first.address}/64"
    assert first.address.startswith("fd")
    assert seen[3:] == [ADDRESS6, seen[4], first.address, "22"]
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 22), 5)"
    for name in (second.name, second.address):
        assert first.run(["python3", "-c", connect, name]).returncode == 0
    assert first.run(["python3", "-c", connect, plain.address]).returncode != 0
    assert socket.getaddrinfo(second.name, 22)[0][4][0] == second.address
    first.block(second)
    assert first.run(["timeout", "1", "python3", "-c", connect, second.address]).returncode != 0
    assert lab.ssh(first, "true").returncode == 0
    first.block("head")
    assert lab.ssh(first, "true", *QUICK).returncode == 255


def test_a_node_is_reached_by_another_door(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes()
    rules = """
        table inet door {
            chain in { type nat hook prerouting priority -100; tcp dport 2222 redirect to :22; }
        }"""
    node.run(["nft", "-f", "-"], input=rules, check=True)
    lab.reach(node, (node.address, 2222))
    assert "[198.18.0.1]:2222" in lab.ssh(node, "true", "-v").stderr
    lab.reach(node, None)
    assert "2222" not in lab.ssh(node, "true", "-v").stderr


def test_a_slow_link_lies_between_the_head_and_a_node(lab: Lab, nodes: NodeFactory) -> None:
    relay = pytest.importorskip("tests.relay")
    (node,) = nodes()
    with relay.Relay((node.address, 22), rate=200_000, delay=0.1) as link:
        lab.reach(node, (link.address, link.port))
        before = time.monotonic()
        assert len(lab.ssh(node, "head -c 300000 /dev/zero | tr '\\0' x").stdout) == 300_000
        assert time.monotonic() - before > 1.5


def test_hosts_behind_a_jump_host_may_be_dead(lab: Lab, nodes: NodeFactory) -> None:
    nodes(1)
    alive, dead = nodes(2, via="n1")
    dead.kill()
    assert lab.ssh(alive, "true").returncode == 0
    assert lab.ssh(dead, "true", *QUICK).returncode == 255


def test_an_agent_that_hangs_takes_what_it_is_asked(lab: Lab) -> None:
    with hung_agent(lab.root / "agent.sock") as path:
        env = lab.head_env(SSH_AUTH_SOCK=str(path))
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(["ssh-add", "-l"], env=env, timeout=1, check=False, capture_output=True)
    assert subprocess.run(["ssh-add", "-l"], env=env, timeout=5, check=False, capture_output=True).returncode == 2


def test_a_second_head_has_the_same_files_and_nothing_else(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes()
    mine, shared = lab.root / "folder", lab.root / "shared-state"
    for folder in (mine, shared):
        folder.mkdir()
    here = lab.mount(shared, Network(export="state"))
    with (
        OtherHead(lab, "login2", {shared: Network(export="state")}) as other,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        abstract.bind("\0of the first head")
        abstract.listen()

        def there(*argv: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*other.enter(mine), *argv], env=lab.head_env(), capture_output=True, text=True, check=False
            )

        (mine / "file").write_text("same")
        (shared / "file").write_text("served")
        assert there("cat", "file", str(shared / "file")).stdout == "sameserved"
        said = there(
            "sh", "-c", "hostname; cat /proc/sys/kernel/random/boot_id; ls -d /proc/[0-9]* | wc -l; ls /dev/shm"
        )
        hostname, boot_id, processes = said.stdout.split()
        assert hostname == "login2"
        assert boot_id != Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert int(processes) < 10
        assert there("ssh", node.name, "echo $SSH_CONNECTION").stdout.split()[0] == OTHER_ADDRESS
        connect = "import socket; socket.socket(socket.AF_UNIX).connect('\\0of the first head')"
        assert "refused" in there("python3", "-c", connect).stderr
        with (shared / "lock").open("w"):
            assert there("flock", "-n", str(shared / "lock"), "true").returncode == 0
        left = subprocess.Popen([*other.enter(mine), "sleep", "4444"])
    assert left.wait(10) != 0, "its processes end with it"
    here.unmount(shared)


LACKS = {
    "without_ctypes": "import _ctypes",
    "without_new_calls": "import os, signal; os.memfd_create, os.pidfd_open, signal.pidfd_send_signal",
}


@pytest.mark.skipif(pythons.unavailable() is not None, reason=str(pythons.unavailable()))
@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("lack", LACKS)
def test_a_python_lacks_something(lab: Lab, nodes: NodeFactory, lack: str, only: bool) -> None:
    (node,) = nodes([NodeSpec(python=getattr(pythons, lack)(), only_python=only)])
    every = "import asyncio, json, select, socket, ssl, sqlite3, subprocess, sys, zipimport; print(sys.executable)"
    assert lab.ssh(node, f"python3 -E -s -S -c '{every}'").stdout == "/usr/local/bin/python3\n"
    error = lab.ssh(node, f"python3 -E -s -S -c '{LACKS[lack]}'").stderr
    assert ("No module named '_ctypes'" if lack == "without_ctypes" else "no attribute") in error
    others = lab.ssh(node, f"ls /usr/bin/python3* {sys.executable}").stdout.split()
    assert bool(others) is not only
    if not only:
        assert lab.ssh(node, f"/usr/bin/python3 -c '{LACKS[lack]}'").stderr == ""


@pytest.mark.skipif(locales.unavailable() is not None, reason=str(locales.unavailable()))
def test_an_account_has_an_encoding_of_its_own(lab: Lab, nodes: NodeFactory) -> None:
    env = locales.latin()
    (node,) = nodes([NodeSpec(env=env, expose=(env["LOCPATH"],))])
    asked = "import os, sys; print(sys.getfilesystemencoding(), sys.stdout.encoding, sys.flags.utf8_mode)"
    assert lab.ssh(node, f"python3 -E -s -S -c '{asked}'").stdout == "iso8859-1 iso8859-1 0\n"
    assert "UnicodeEncodeError" in lab.ssh(node, "python3 -E -s -S -c 'print(chr(0x2603))'").stderr
