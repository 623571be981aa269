"""`clusterctl health` and the preflight of `up` on real nodes, whose GPUs a stand-in for NVIDIA's library plays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from tests import fake_nvml
from tests.lab import hung_mount
from tests.lab.gpu_node import DMESG, SCENE, SITE, gpu_node
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lab.lab import Lab
    from tests.lab.node import Node

GPUS: Final = 8
PORT: Final = 29431
MODEL: Final = "NVIDIA H100 80GB HBM3"
ROUNDS: Final = int(os.environ.get("HEALTH_ROUNDS", "5"))
ON_TIME: Final = 25.0
"""Seconds that a look at four nodes may take with something hung on one: the probe's deadline, and a busy machine."""

SHARED_MACHINE: Final = {"host.load.warn": 1e6, "host.memory.warn": 0, "host.cpus.gpu": 0, "gpu.responsive.fail": 6}
"""All nodes share the CPUs and memory of whatever machine runs the tests, which is none of their doing. And a driver
that hangs need not do so for half a minute."""

EXPECTED: Final = {
    ("gpu.device_access", "UNKNOWN"): "the library is played, but there are no /dev/nvidia* to be opened",
    ("gpu.lib_mismatch", "UNKNOWN"): "there is no kernel module either, whose version could be compared",
}
"""What a healthy node of the lab has to complain of, and why that is right."""


@dataclass
class Machines:
    """Nodes with GPUs, all in one cluster file."""

    made: list[Node]
    scenes: dict[str, fake_nvml.Scenario]

    @classmethod
    def made_by(cls, lab: Lab, count: int, user: str = "root") -> Machines:
        """Add such nodes to a lab."""
        return cls(lab.add([gpu_node(user)] * count), {})

    def heal(self) -> None:
        """Make every played thing healthy again."""
        for number, node in enumerate(self.made):
            self.scenes[node.name] = fake_nvml.Scenario(node.path(SCENE), GPUS, node=number)
            node.path(DMESG).write_text("[    1.000000] Linux version 6.8.0\n")


@pytest.fixture(scope="module")
def machines(lab: Lab) -> Iterator[Machines]:
    found = Machines.made_by(lab, 4)
    yield found
    lab.remove(found.made)
    lab.end_head_processes()


@pytest.fixture
def four(machines: Machines) -> Machines:
    machines.heal()
    return machines


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


def write(head: Head, made: list[Node], health: dict[str, Any] | None = None, **more: Any) -> None:
    section = {**(health or {}), "thresholds": {**SHARED_MACHINE, **(health or {}).get("thresholds", {})}}
    hosts = [{"host": node.name, "gpus": GPUS, "workers": 1} for node in made]
    document = {"version": 1, "name": "lab", "hosts": hosts, "job": {"command": ["true"]}, "health": section, **more}
    (head.folder / "cluster.yaml").write_text(yaml.safe_dump(document))


def look(head: Head, *arguments: str) -> dict[str, Any]:
    began = time.monotonic()
    done = head.run("health", "--json", *arguments)
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return {**told, "code": done.returncode, "took": time.monotonic() - began}


def findings(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(f for node in told["nodes"] for f in node["findings"]), *told["cluster"]]


def complaints(told: dict[str, Any], *statuses: str) -> list[dict[str, Any]]:
    """What is wrong beyond what a healthy lab says."""
    wanted = statuses or ("FAIL", "WARN")
    return [f for f in findings(told) if f["status"] in wanted and (f["check"], f["status"]) not in EXPECTED]


# --- GPUs ------------------------------------------------------------------------------------------------------


def lost(four: Machines, node: Node) -> None:
    four.scenes[node.name].gpu(3, errors={"*": fake_nvml.LOST})


def hung(four: Machines, node: Node) -> None:
    four.scenes[node.name].system(hang=["nvmlInitWithFlags"])


def xid79(_: Machines, node: Node) -> None:
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    line = f"[{uptime - 600:12.6f}] NVRM: Xid (PCI:0000:15:00): 79, pid=1234, GPU has fallen off the bus."
    node.path(DMESG).write_text(f"{line}\n")


def remap_failure(four: Machines, node: Node) -> None:
    four.scenes[node.name].gpu(5, remapped=[0, 2, 0, 1])


def slowed(four: Machines, node: Node) -> None:
    four.scenes[node.name].gpu(5, throttle=fake_nvml.HW_THERMAL, temp=88)


def missing(four: Machines, node: Node) -> None:
    four.scenes[node.name].data["devices"].pop()
    four.scenes[node.name].write()


def mismatch(four: Machines, node: Node) -> None:
    four.scenes[node.name].system(errors={"nvmlInitWithFlags": fake_nvml.MISMATCH})


def other_driver(four: Machines, node: Node) -> None:
    four.scenes[node.name].system(driver="535.183.01")


FAULTS: Final[list[tuple[Callable[[Machines, Node], None], dict[str, int | None], str, str]]] = [
    # The last of them stops no start: NCCL has to be equal on all nodes, drivers do not.
    (lost, {"gpu.lost": 3}, "GPU is lost", "boot"),
    (hung, {"gpu.responsive": None}, "NVML hangs", "boot"),
    (xid79, {"gpu.xid": 5}, "XID 79, GPU has fallen off the bus, 10 min ago", "boot"),
    (remap_failure, {"gpu.remap_failure": 5}, "row remapping failed, serial 16500000005", "replaced"),
    (
        slowed,
        {"gpu.throttle_hw": 5, "gpu.throttle_outlier": 5, "gpu.temperature": 5, "gpu.temperature_outlier": 5},
        "hardware thermal",
        "fans",
    ),
    (missing, {"gpu.count": None}, "7 of 8 GPUs", "boot"),
    (mismatch, {"gpu.lib_mismatch": None}, "driver/library version mismatch", "boot"),
    (other_driver, {"version.driver": None, "version.driver_minor": None}, "535, 570 elsewhere", "driver"),
]


@pytest.mark.parametrize(("make", "found", "words", "remedy"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_a_sick_gpu_on_one_of_four_nodes_is_named_with_its_remedy(
    four: Machines, head: Head, make: Callable[[Machines, Node], None], found: dict[str, int], words: str, remedy: str
) -> None:
    write(head, four.made)
    make(four, four.made[2])

    told = look(head)

    seen = complaints(told)
    assert (told["code"], told["took"] < ON_TIME) == (0 if make is other_driver else 5, True)
    assert {(f["node"], f["check"], f["gpu"]) for f in seen} == {(four.made[2].name, c, g) for c, g in found.items()}
    assert any(words in f["message"] for f in seen), seen
    assert any(remedy in f["hint"].lower() for f in seen), [f["hint"] for f in seen]


def test_a_driver_that_is_only_slow_fails_no_node(four: Machines, head: Head) -> None:
    """Without persistence mode the first handle of each GPU costs seconds: longer than all else may take."""
    node = four.made[2]
    four.scenes[node.name].system(delay_ms={"nvmlDeviceGetHandleByIndex_v2": 500})
    write(head, four.made, {"thresholds": {"gpu.responsive.warn": 3, "gpu.responsive.fail": 30}})

    told = look(head)

    assert (told["code"], told["took"] < ON_TIME) == (0, True)
    (seen,) = complaints(told)
    assert (seen["node"], seen["check"], seen["status"]) == (node.name, "gpu.responsive", "WARN")
    assert "persistence mode" in seen["hint"]


def test_a_node_whose_kernel_log_is_closed_is_told_so_once_and_passes_strictly(four: Machines, head: Head) -> None:
    node = four.made[1]
    node.path(DMESG).unlink()
    write(head, [node], {"ignore": [check for check, _ in EXPECTED]})

    told, shown = look(head, "--strict"), head.run("health", "--strict").stdout

    assert told["verdict"] == "PASS", complaints(told, "FAIL", "WARN", "UNKNOWN")
    assert {f["check"] for f in findings(told) if f["needs_root"]} == {"gpu.xid", "gpu.sxid", "host.kernel_log"}
    assert [line.count("needs root") for line in shown.splitlines() if "needs root" in line] == [1]
    assert shown.count("usermod -aG adm") == 1


def test_a_process_that_holds_gpu_memory_is_named(four: Machines, head: Head) -> None:
    node = four.made[1]
    write(head, four.made)
    holder = node.start(["sleep", "600"])
    pid = node.wait_for(lambda: node.pid_of("^sleep 600"), what="the holder")
    four.scenes[node.name].gpu(2, compute_procs=[{"pid": pid, "used": 3 << 30}], mem_used=3 << 30)

    told = look(head)

    node.signal(pid, signal.SIGKILL)
    holder.wait()
    assert told["code"] == 5
    seen = {(f["node"], f["check"], f["gpu"]): f["message"] for f in complaints(told)}
    assert set(seen) == {(node.name, "gpu.foreign_procs", 2), (node.name, "gpu.mem_used", 2)}
    assert all(f"sleep {pid} (uid 0, 3.0 GiB)" in message for message in seen.values()), seen


def test_a_python_without_nvidias_bindings_uses_those_that_travel_with_the_agent(four: Machines, head: Head) -> None:
    node = four.made[0]
    write(head, [node], defaults={"python": "/usr/bin/python3"})

    told = look(head)

    groups = told["nodes"][0]["facts"]["groups"]
    assert node.run(["/usr/bin/python3", "-c", "import pynvml"]).returncode == 1
    assert groups["versions"]["data"]["executable"] == "/usr/bin/python3"
    assert [device["v"]["name"] for device in groups["nvml"]["data"]["devices"]] == [MODEL] * GPUS


# --- machines --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def clock_ahead(node: Node) -> Iterator[None]:
    node.skew_clock(5)
    try:
        yield
    finally:
        node.skew_clock(0)


@contextlib.contextmanager
def port_closed(node: Node) -> Iterator[None]:
    node.firewall(PORT)
    try:
        yield
    finally:
        node.open_firewall()


@contextlib.contextmanager
def other_torch(node: Node) -> Iterator[None]:
    usual, other = (node.path(f"{SITE}/torch-{version}.dist-info") for version in ("2.6.0", "1.9.0"))
    usual.rename(other)
    try:
        yield
    finally:
        other.rename(usual)


@contextlib.contextmanager
def disk_full(node: Node) -> Iterator[None]:
    node.fill_disk()
    try:
        yield
    finally:
        node.free_disk()


@contextlib.contextmanager
def small_shm(node: Node) -> Iterator[None]:
    def sized(size: str) -> None:
        node.run(["mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)

    sized("16m")
    try:
        yield
    finally:
        sized("4g")


@pytest.mark.parametrize(
    ("sick", "check", "status", "words"),
    [
        (clock_ahead, "net.clock_skew", "WARN", " s ahead"),
        (other_torch, "version.torch", "FAIL", "torch 1.9.0, 2.6.0 elsewhere"),
        (disk_full, "host.disk", "FAIL", "100 % full"),
        (hung_mount.on, "host.mounts", "FAIL", "/mnt (fuse.hung) hangs"),
        (small_shm, "host.shm", "FAIL", "16 MiB of shared memory free for 1 rank"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_one_sick_machine_of_four_is_named_and_the_look_ends_in_time(
    four: Machines,
    head: Head,
    sick: Callable[[Node], contextlib.AbstractContextManager[None]],
    check: str,
    status: str,
    words: str,
) -> None:
    node = four.made[3]
    write(head, four.made)

    with sick(node):
        told = look(head)

    seen = complaints(told)
    assert (told["code"], told["took"] < ON_TIME) == (5 if status == "FAIL" else 0, True)
    assert {f["node"] for f in seen} == {node.name}, seen
    (found,) = [f for f in seen if f["check"] == check and f["status"] == status]
    assert words in found["message"]
    assert found["hint"]


def test_a_port_that_the_first_nodes_firewall_closes_is_told_of_it_and_of_all_others(
    four: Machines, head: Head
) -> None:
    first, *others = four.made
    write(head, four.made, network={"master_port": PORT})

    with port_closed(first):
        told = look(head)

    seen = {f["node"]: f["message"] for f in complaints(told)}
    assert (told["code"], told["took"] < ON_TIME) == (5, True)
    assert {f["check"] for f in complaints(told)} == {"net.rendezvous"}
    assert "none of 3 nodes could connect" in seen[first.name]
    place = f"cannot connect to {first.name} at {first.address}:{PORT}: no answer"
    assert all(place in seen[node.name] for node in others)


def test_one_node_that_is_parted_from_the_first_is_named(four: Machines, head: Head) -> None:
    write(head, four.made)
    four.made[2].block(four.made[0])
    try:
        told = look(head)
    finally:
        four.made[2].unblock()

    assert [(f["node"], f["check"]) for f in complaints(told)] == [(four.made[2].name, "net.rendezvous")]


def test_a_way_that_swallows_large_packets_is_named_with_both_its_ends(four: Machines, head: Head) -> None:
    """As a switch does whose MTU is smaller than that of the nodes, and nobody tells them."""
    _, one, other, _ = four.made
    write(head, four.made)

    other.swallow(one, above=1400)
    try:
        told = look(head)
    finally:
        other.open_firewall()

    assert (told["code"], told["took"] < ON_TIME) == (5, True)
    (found,) = complaints(told)
    assert (found["node"], found["check"]) == (one.name, "net.ring")
    assert f"{one.name} to {other.name} at {other.address}:" in found["message"]
    assert "the connection opens, but then only 0 B of 256 KiB arrived" in found["message"]
    assert "MTU" in found["hint"]


def test_ports_that_are_closed_but_for_the_one_of_the_rendezvous_are_told(four: Machines, head: Head) -> None:
    third, last = four.made[2:]
    write(head, four.made, network={"master_port": PORT})

    last.firewall(f"1024-{PORT - 1}", f"{PORT + 1}-65535")
    try:
        told = look(head)
    finally:
        last.open_firewall()

    (found,) = complaints(told)
    assert (told["code"], found["node"], found["check"]) == (5, third.name, "net.ring")
    assert f"{third.name} to {last.name} at {last.address}:" in found["message"]
    assert "a firewall drops the packets" in found["message"]


# --- no false alarm --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["root", "train"])
def entered(request: pytest.FixtureRequest, machines: Machines, lab: Lab) -> Iterator[Machines]:
    """Nodes that we enter as root, and such where we are an ordinary user."""
    if request.param == "root":
        yield machines
        return
    found = Machines.made_by(lab, 3, request.param)
    yield found
    lab.remove(found.made)


@pytest.fixture
def healthy(entered: Machines) -> Machines:
    entered.heal()
    return entered


def test_healthy_nodes_say_the_same_every_time_and_nothing_is_wrong(healthy: Machines, head: Head) -> None:
    write(head, healthy.made)

    for _ in range(ROUNDS):
        told = look(head)
        bad = [f for f in findings(told) if f["status"] in ("FAIL", "WARN", "UNKNOWN")]
        assert {(f["check"], f["status"]) for f in bad} == set(EXPECTED), [f["message"] for f in bad]
        for node in told["nodes"]:
            assert sum(f["status"] == "PASS" for f in node["findings"]) >= 25
            assert {f["check"] for f in node["findings"] if f["status"] in ("WARN", "UNKNOWN")} == {
                check for check, _ in EXPECTED
            }


def test_strictly_nothing_is_wrong_with_healthy_nodes_either(healthy: Machines, head: Head) -> None:
    write(head, healthy.made, {"ignore": [check for check, _ in EXPECTED]})

    told = look(head, "--strict")

    assert (told["code"], told["verdict"]) == (0, "PASS"), complaints(told, "FAIL", "WARN", "UNKNOWN")


# --- the preflight, and what the cluster file says --------------------------------------------------------------


def started_nothing(four: Machines) -> None:
    for node in four.made:
        assert not node.path("ran").exists()
        assert not list(node.path(".local/state/clusterctl").glob("nodes/*/*/attempt-*"))
    left = [n.leftovers() for n in four.made]
    wait_for(lambda: not any(n.leftovers() for n in four.made), what=f"{left} to be gone")


def test_up_refuses_a_sick_node_and_starts_nothing_unless_told_not_to_look(four: Machines, head: Head) -> None:
    job = {"command": "touch ~/ran"}
    lost(four, four.made[2])

    write(head, four.made, job=job)
    refused = head.run("up")
    started_nothing(four)
    write(head, four.made, {"ignore": [f"gpu.lost@{four.made[2].name}"]}, job=job)
    strict = head.run("up", "--strict")
    started_nothing(four)
    ignored = head.run("up")
    ran = [node.path("ran").exists() for node in four.made]
    for node in four.made:
        node.path("ran").unlink()
    write(head, four.made, job=job)
    unseen = head.run("up", "--no-health")

    assert refused.returncode == 5, refused.stderr
    assert f"{four.made[2].name} GPU 3" in refused.stderr
    assert "GPU is lost" in refused.stderr
    assert strict.returncode == 5, strict.stderr
    assert ignored.returncode == 0, ignored.stderr
    assert all(ran)
    assert unseen.returncode == 0, unseen.stderr
    assert all(node.path("ran").exists() for node in four.made)


def test_the_cluster_file_decides_what_is_expected_ignored_and_how_grave(four: Machines, head: Head) -> None:
    one = four.made[0]
    lost(four, one)
    section = {
        "expect": {"driver": "999.*", "gpu_model": "NVIDIA H100*"},
        "ignore": ["gpu.lost"],
        "severity": {"version.expected": "warn"},
        "required": ["gpu.device_access"],
        "thresholds": {"host.nofile.warn": 1e9},
    }
    write(head, [one], section)

    told = look(head)

    by_check = {f["check"]: f for f in findings(told)}
    assert told["code"] == 5
    assert (by_check["gpu.lost"]["status"], by_check["gpu.lost"]["ignored"]) == ("SKIP", True)
    assert by_check["gpu.lost"]["message"].startswith("ignored (FAIL): ")
    assert by_check["version.expected"]["status"] == "WARN"
    assert by_check["gpu.device_access"]["status"] == "FAIL"
    assert by_check["gpu.device_access"]["message"].startswith("required, but unknown: ")
    assert by_check["host.nofile"]["status"] == "WARN"


def test_strict_only_and_skip_choose_what_counts(four: Machines, head: Head) -> None:
    write(head, [four.made[0]])

    lenient, strict = look(head), look(head, "--strict")
    only = look(head, "--strict", "--only", "gpu.count,host.d*")
    skipped = look(head, "--strict", "--skip", ",".join(check for check, _ in EXPECTED))

    assert (lenient["code"], strict["code"], only["code"], skipped["code"]) == (0, 5, 0, 0)
    assert {f["check"] for f in findings(only)} == {"gpu.count", "host.disk"}


def test_watch_looks_again_until_it_is_interrupted(four: Machines, head: Head) -> None:
    node = four.made[0]
    write(head, [node])
    argv = [sys.executable, "-m", "clusterctl", "health", "--watch", "1s", "--format", "ndjson", "--only", "gpu.lost"]

    with subprocess.Popen(argv, cwd=head.folder, env=dict(head.env), stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        lost(four, node)
        later = next(told for line in watching.stdout if (told := json.loads(line))["status"] != "PASS")
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()

    assert first["status"] == "PASS"
    assert (later["status"], later["node"], later["gpu"]) == ("FAIL", node.name, 3)
    assert watching.returncode == 130
