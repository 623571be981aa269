"""Places that are shared, small, read-only or noexec; processes that are hidden or counted; limits that are shown."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.lab import cgroups, crowd
from tests.lab.places import HOME, TEMPORARY, Network, Place
from tests.lab.spec import NodeSpec

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab

needs_cgroups = pytest.mark.skipif(not cgroups.exist(), reason="no cgroups of version 1 and 2 side by side")


def test_containers_of_one_machine_share_folders_and_count_alike(lab: Lab, nodes: NodeFactory) -> None:
    places = {name: Place(shared=f"host{name.replace('/', '-')}") for name in TEMPORARY}
    first, second, other = nodes([NodeSpec(places=places), NodeSpec(places=places), NodeSpec()])
    for node in (first, second):
        node.next_pid(7000)
    made = [
        lab.ssh(n, f"echo $$; for d in {' '.join(TEMPORARY)}; do echo $$ >> $d/pids; done") for n in (first, second)
    ]
    assert made[0].stdout == made[1].stdout
    pid = made[0].stdout
    assert 7000 <= int(pid) < 7100
    for name in TEMPORARY:
        assert second.path(f"{name}/pids").read_text() == pid * 2
        assert not other.path(f"{name}/pids").exists()
        assert second.path(name).stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize("place", [HOME, *TEMPORARY])
def test_a_place_can_be_read_only(lab: Lab, nodes: NodeFactory, place: str) -> None:
    (node,) = nodes([NodeSpec(places={place: Place(flags=("ro",))})])
    done = lab.ssh(node, f"touch {place}/file; touch /run/file")
    assert "Read-only file system" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("network", [None, Network()])
@pytest.mark.parametrize("place", [HOME, *TEMPORARY])
def test_no_program_may_run_in_a_place(lab: Lab, nodes: NodeFactory, place: str, network: Network | None) -> None:
    (node,) = nodes([NodeSpec(places={place: Place(flags=("noexec",), network=network)})])
    done = lab.ssh(
        node, f"cp /bin/true {place}/true && {place}/true; stat -f -c %i / && cp /bin/true /run && /run/true"
    )
    assert "Permission denied" in done.stderr
    assert done.returncode == 0
    assert lab.ssh(node, f"{sys.executable} -c 'import ssl'").returncode == 0


def test_shared_memory_can_be_tiny_and_full(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes([NodeSpec(places={"/dev/shm": Place(size="64k")})])
    assert "No space left" in lab.ssh(node, "head -c 70000 /dev/zero > /dev/shm/other").stderr
    assert "No space left" in lab.ssh(node, "echo x > /dev/shm/mine").stderr
    assert node.path("/dev/shm/other").stat().st_size == 65536


def test_processes_of_others_are_hidden(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes([NodeSpec(user="train", proc="hidepid=2")])
    seen = lab.ssh(node, "ls -d /proc/1 2>&1; cat /proc/*/comm | grep -c sshd; id -u").stdout.splitlines()
    assert "No such file" in seen[0]
    assert int(seen[1]) <= 1, "only the user's own"
    assert seen[2] == "2000"
    assert node.pid_of("sshd")


def test_a_user_may_have_few_processes_whatever_other_nodes_have(lab: Lab, nodes: NodeFactory) -> None:
    first, second = nodes([NodeSpec(user="train", account=3100 + i, limits={"nproc": "20"}) for i in range(2)])
    fork = "import os, sys\nmade = 0\ntry:\n  while True:\n    if not os.fork(): sys.stdin.read(); os._exit(0)\n"
    fork += "    made += 1\nexcept BlockingIOError: print(made, flush=True)\nsys.stdin.read()"
    argv = first.inside(["prlimit", "--nproc=20", "python3", "-c", fork], "train")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as full:
        assert full.stdout is not None
        assert 0 < int(full.stdout.readline()) < 20
        refused = lab.ssh(first, "true; (true) | (true)")
        assert refused.returncode != 0
        assert lab.ssh(second, "id -u; ulimit -u; (true) | (true)").stdout == "3101\n20\n"
        full.communicate("")


def test_a_process_may_have_few_files(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes(1, limits={"nofile": "64"})
    program = "f = [open('/dev/null')]\nwhile True: f.append(open('/dev/null'))"
    assert "Too many open files" in lab.ssh(node, f'python3 -c "{program}"').stderr


def test_a_node_is_full_of_processes_in_no_time(lab: Lab, nodes: NodeFactory) -> None:
    first, second = nodes(2, user="train", expose=(crowd.folder(),))
    before = time.monotonic()
    with crowd.on(first, 5000):
        assert time.monotonic() - before < 10
        assert int(lab.ssh(first, "ls -d /proc/[0-9]* | wc -l").stdout) > 5000
        assert {p.uid for p in first.processes() if p.comm == "crowd"} == {2000}
        assert len(first.pids_of("/crowd 5000")) == 5001
        assert len(second.processes()) < 10
    first.wait_for(lambda: not first.pids_of("/crowd 5000"), what="the crowd to be gone")


BUSY = "import time; a = time.monotonic(); c = time.process_time()\nwhile time.process_time() - c < 0.2: pass\n"
BUSY += "print(time.monotonic() - a)"
PATIENCE = 100.0
"""Seconds for a login on a tenth of a CPU, of which a loaded machine gives each turn late."""


@needs_cgroups
def test_a_node_has_a_tenth_of_a_cpu(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes([NodeSpec(cgroup=True, cpus=0.1)])
    group = "/sys/fs/cgroup/cpu"
    said = lab.ssh(
        node, f"cat {group}/cpu.cfs_quota_us {group}/cpu.cfs_period_us; grep -E ':cpu(,cpuacct)?:' /proc/self/cgroup"
    )
    assert said.stdout.split()[:2] == ["10000", "100000"]
    assert said.stdout.strip().endswith(":/")
    assert float(lab.ssh(node, f"python3 -c '{BUSY}'", timeout=PATIENCE).stdout) > 1.5
    throttled = lab.ssh(node, f"grep nr_throttled {group}/cpu.stat").stdout.split()[1]
    assert int(throttled) > 0


@needs_cgroups
def test_files_of_version_2_say_what_limits_the_node(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes([NodeSpec(cgroup=True, cpus=0.1, memory="1g", cgroup_view="v2")])
    said = lab.ssh(node, "cd /sys/fs/cgroup && cat cpu.max memory.max; grep -c '^cgroup2 /sys/fs/cgroup ' /proc/mounts; "
                         "grep -c '^cgroup /sys' /proc/mounts; grep ^0: /proc/self/cgroup")  # fmt: skip
    assert said.stdout.split() == ["10000", "100000", str(1 << 30), "1", "0", "0::/"]
    assert float(lab.ssh(node, f"python3 -c '{BUSY}'", timeout=PATIENCE).stdout) > 1.5


def test_a_place_on_a_server_can_be_any(nodes: NodeFactory, tmp_path: Path) -> None:
    network = Place(network=Network(export="scratch"))
    first, second = nodes([NodeSpec(places={"/var/tmp": network}), NodeSpec(places={"/tmp": network})])
    first.path("/var/tmp/file").write_text("here")
    assert second.path("/tmp/file").read_text() == "here"
    assert second.path("/tmp").stat().st_mode & 0o7777 == 0o1777
