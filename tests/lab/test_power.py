"""Nodes that start again, stand still, sleep, and are cleaned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import cgroups, suspend, temporary
from tests.lab.places import Place
from tests.lab.spec import NodeSpec

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab

needs_cgroups = pytest.mark.skipif(not cgroups.exist(), reason="no cgroups of version 1 and 2 side by side")
needs_cleaner = pytest.mark.skipif(temporary.unavailable() is not None, reason=str(temporary.unavailable()))
QUICK = ("-o", "ConnectTimeout=2", "-o", "ConnectionAttempts=1")
CLOCKS = "import time; print(*[time.clock_gettime(c) for c in (time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME, time.CLOCK_REALTIME)])"


def clocks(lab: Lab, node: object) -> list[float]:
    return [float(word) for word in lab.ssh(node, f"python3 -c '{CLOCKS}'").stdout.split()]  # type: ignore[arg-type]


def test_a_reboot_keeps_disks_and_nothing_else(lab: Lab, nodes: NodeFactory) -> None:
    first, second = nodes([NodeSpec(user="train", places={"/tmp": Place(survives=True)}), NodeSpec()])
    places = ("~", "/tmp", "/var/tmp", "/dev/shm", "/run")
    lab.ssh(
        first, "for d in ~ /tmp /var/tmp /dev/shm; do echo $d > $d/mine; done; setsid sleep 1234 > /dev/null 2>&1 &"
    )
    boot_id, address = first.boot_id, first.address
    first.wait_for(lambda: first.pid_of("sleep 1234"), what="the sleeper")
    first.reboot()
    seen = lab.ssh(first, f"cat /proc/sys/kernel/random/boot_id; ls -d {' '.join(f'{p}/mine' for p in places)}; id -u")
    assert seen.stdout.split() == [first.boot_id, "/home/train/mine", "/tmp/mine", "/var/tmp/mine", "2000"]
    assert first.boot_id != boot_id
    assert first.address == address
    assert first.pid_of("sleep 1234") is None
    assert lab.ssh(second, "find /tmp -xdev -type f").stdout == "", "what the lab mounts below it aside"
    first.fill_disk()
    assert "No space left" in lab.ssh(first, "head -c 100000 /dev/zero > ~/more").stderr


def test_a_node_that_starts_again_counts_from_nothing(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes()
    _, before, _ = clocks(lab, node)
    node.next_pid(1000)
    assert int(lab.ssh(node, "echo $$").stdout) >= 1000
    node.reboot()
    monotonic, boottime, wall = clocks(lab, node)
    assert boottime < before
    assert abs(monotonic - boottime) < 1
    assert monotonic < 20
    assert abs(wall - time.time()) < 20
    uptime, started, new_pid, inside = lab.ssh(
        node,
        "cut -d' ' -f1 /proc/uptime; grep btime /proc/stat | cut -d' ' -f2; echo $$; cut -d' ' -f22 /proc/self/stat",
    ).stdout.split()
    assert float(uptime) < 20
    assert abs(time.time() - float(started)) < 30
    assert int(new_pid) < 100
    assert int(inside) < 2000
    assert float(node.run(["cut", "-d", " ", "-f", "1", "/proc/uptime"]).stdout) < 20


def test_a_node_is_without_power_until_it_boots(lab: Lab, nodes: NodeFactory) -> None:
    first, second = nodes(2)
    first.path("note").write_text("kept")
    first.block(second)
    for _ in range(2):
        first.kill()
        assert lab.ssh(first, "true", *QUICK).returncode == 255
        assert not first.alive
        first.boot()
        done = lab.ssh(first, "cat ~/note")
        assert done.stdout == "kept", done.stderr
    connect = ["python3", "-c", f"import socket; socket.create_connection(('{second.address}', 22), 1)"]
    assert first.run(connect).returncode != 0, "what was blocked is"


def test_a_machine_that_is_told_to_reboot_tells_its_processes(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes()
    trap = "trap 'echo told > ~/told; exit' TERM; echo > /run/ready; while :; do sleep 0.05; done"
    lab.ssh(node, f'setsid sh -c "{trap}" > /dev/null 2>&1 < /dev/null &')
    node.wait_for(lambda: node.path("/run/ready").exists(), what="the trap")
    node.reboot(orderly=True)
    assert node.path("told").read_text() == "told\n"


def test_a_machine_may_have_been_up_for_long(lab: Lab, nodes: NodeFactory) -> None:
    old, young = nodes([NodeSpec(uptime=400 * 86400.0), NodeSpec(uptime=1.0)])
    assert abs(clocks(lab, old)[0] - 400 * 86400) < 60
    assert clocks(lab, young)[1] < 60
    young.reboot(3600.0)
    assert 3600 <= clocks(lab, young)[1] < 3660


COUNT = """
import time
while True:
    open("/run/now", "w").write(str(time.monotonic()))
    time.sleep(0.01)
"""


@needs_cgroups
def test_a_paused_node_stands_still_and_goes_on(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes(1, cgroup=True)
    lab.ssh(node, f"setsid python3 -c '{COUNT}' > /dev/null 2>&1 < /dev/null &")
    decoy = node.start(["sleep", "1000"])
    node.wait_for(lambda: node.path("/run/now").exists(), what="the counter")
    node.pause()
    stood = node.path("/run/now").read_text()
    assert lab.ssh(node, "true", *QUICK).returncode == 255
    assert node.path("/run/now").read_text() == stood
    assert "/clusterctl-lab-" in Path(f"/proc/{decoy.pid}/cgroup").read_text(), "what is started in it stands, too"
    node.resume()
    node.wait_for(lambda: node.path("/run/now").read_text() not in (stood, ""), what="the counter to go on")
    # The head has asked in vain for the node's hardware address, at most three times in three seconds. Until they are
    # over the kernel does not ask again, and whoever connects meanwhile shares that failure: "No route to host".
    assert lab.ssh(node, "true", "-o", "ConnectionAttempts=5").returncode == 0
    decoy.kill()
    decoy.wait()


@needs_cgroups
def test_a_paused_node_can_be_killed(nodes: NodeFactory) -> None:
    (node,) = nodes(1, cgroup=True)
    node.pause()
    node.kill()
    assert not node.alive


@needs_cgroups
def test_the_monotonic_clock_of_a_node_that_slept_is_behind(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes([suspend.sleeper()])
    since = suspend.suspend(node)
    time.sleep(2)  # that it stands still for a time is what is to be seen
    suspend.wake(node, since)
    monotonic, boottime, wall = clocks(lab, node)
    assert abs(time.monotonic() - monotonic - 2) < 0.5
    assert abs(time.clock_gettime(time.CLOCK_BOOTTIME) - boottime) < 0.5
    assert abs(time.time() - wall) < 0.5


@needs_cleaner
def test_what_nobody_has_touched_for_a_month_is_removed(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes()
    lab.ssh(node, "mkdir -p /var/tmp/old/locked /tmp/of-today; touch /var/tmp/old/locked/file /var/tmp/old/file ~/file;"
                  "cd /var/tmp/old/locked; setsid flock . sh -c 'touch /run/held; sleep 1000' > /dev/null 2>&1 &")  # fmt: skip
    node.wait_for(lambda: node.path("/run/held").exists(), what="the lock")
    temporary.clean(node, 9)
    assert node.path("/tmp/of-today").exists()
    temporary.clean(node, 29)
    assert not node.path("/tmp/of-today").exists()
    assert node.path("/var/tmp/old/file").exists()
    temporary.clean(node, 31)
    assert not node.path("/var/tmp/old/file").exists()
    assert node.path("/var/tmp/old/locked/file").exists(), "a folder that is locked is left alone"
    assert node.path("file").exists()
