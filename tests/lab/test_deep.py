"""Deep checks find the bad node or link of eight, and blame no healthy one. `make deep` plays DEEP_ROUNDS of each fault.

Each link carries 200 Mbit/s, so that the network and not the CPU limits transfers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.head_cli import Head
from tests.lab.lab import Lab
from tests.lab.node import Node
from tests.lab.spec import SHARED, NodeSpec
from tests.lab.waiting import wait_for

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.skipif("CLUSTERCTL_LONG" not in os.environ, reason="`make deep` runs it"),
]
NODES = int(os.environ.get("DEEP_NODES", "8"))
ROUNDS = range(int(os.environ.get("DEEP_ROUNDS", "1")))
CPUS = 2.0
PERIOD_US = 100_000
_ADVERSE = ("FAIL", "WARN", "UNKNOWN")
WRONG_BITS = """\
import sys
if any(word.endswith(".rank_steps") for word in sys.orig_argv):
    import torch
    right = torch.mm
    def multiply(a, b, *, out):
        right(a, b, out=out)
        out[7, 11] += 1
    torch.mm = multiply
"""
COPIES = "a = bytearray(64 << 20)\nwhile True:\n    b = bytes(a)\n"


@pytest.fixture(scope="module")
def made(lab: Lab) -> Iterator[list[Node]]:
    nodes = lab.add([NodeSpec(cgroup=True, cpus=CPUS) for _ in range(NODES)])
    for node in nodes:
        tc(node, "qdisc add dev {dev} root handle 1: htb default 10")
        tc(node, "class add dev {dev} parent 1: classid 1:10 htb rate 200mbit quantum 60000")
    yield nodes
    lab.remove(nodes)
    lab.end_head_processes()


def tc(node: Node, command: str) -> None:
    node.run(["tc", *command.format(dev=node.interface).split()], check=True)


@pytest.fixture
def head(made: list[Node], tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, {**head_env, "XDG_STATE_HOME": str(tmp_path / "state")})


def write(head: Head, nodes: Sequence[Node], **env: dict[str, str]) -> None:
    python = {"python": sys.executable, "gpus": 0, "workers": 1}
    hosts = [{"host": node.name, **python, "env": env.get(node.name, {})} for node in nodes]
    document = {"version": 1, "name": "deep", "hosts": hosts, "env": {"OMP_NUM_THREADS": "1"}}
    (head.folder / "cluster.yaml").write_text(yaml.safe_dump(document))


def run_deep_check(head: Head, at_devices: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Run a deep check, calling `at_devices` once the devices are measured; return the adverse findings about it."""
    checking = head.start("health", "--deep", "--json")
    runs = Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs"

    def has_begun() -> bool:
        outputs = [path.read_bytes() for path in runs.glob("*/nodes/*/attempt-0/rank-*.log")]
        return checking.poll() is not None or any(b'"begin": "memory"' in output for output in outputs)

    try:
        wait_for(has_begun, 600, "the first measurement", every=0.1)
        at_devices()
        printed, said = checking.communicate(timeout=600)
    finally:
        checking.kill()
    report = json.loads(printed)
    findings = [finding for node in report["nodes"] for finding in node["findings"]] + report["cluster"]
    adverse = [f for f in findings if f["check"].startswith("deep.") and f["status"] in _ADVERSE]
    lines = [f"{f['status']} {f['check']} {f['node']}: {f['message']}" for f in findings if f["status"] in _ADVERSE]
    print(said[-300:], *lines, sep="\n")
    judged = {
        f["check"] for f in findings if f["check"].startswith("deep.") and f["status"] in ("PASS", "WARN", "FAIL")
    }
    unknown = {str(f["node"]) for f in adverse if f["check"] == "deep.context" and f["status"] == "UNKNOWN"}
    assert {"deep.context", "deep.bits"} <= judged or unknown <= list_blamed(adverse), "the nodes were not measured"
    return adverse


def list_blamed(findings: list[dict[str, Any]]) -> set[str]:
    return {str(finding["node"]) for finding in findings if finding["status"] == "FAIL"}


def list_named(findings: list[dict[str, Any]]) -> set[str]:
    return {f["node"] for f in findings if f["status"] in ("FAIL", "WARN") and f["node"] is not None}


def share_cpus(nodes: Sequence[Node], slow: Node | None = None) -> None:
    """Give each node an equal share of two CPUs, and `slow` a tenth of it. The start of the check had all of them."""
    for node in nodes:
        set_cpus(node, 2 / NODES / (10 if node is slow else 1))


@contextlib.contextmanager
def limited_cpus(nodes: Sequence[Node]) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            set_cpus(node, CPUS)


def set_cpus(node: Node, cpus: float) -> None:
    (folder,) = (path for path in map(Path, node.cgroups) if (path / "cpu.cfs_quota_us").exists())
    (folder / "cpu.cfs_quota_us").write_text(str(int(cpus * PERIOD_US)))


@pytest.mark.parametrize("number", ROUNDS)
def test_no_healthy_node_is_blamed(head: Head, made: list[Node], number: int) -> None:
    write(head, made)
    assert list_blamed(run_deep_check(head)) == set()


@pytest.mark.parametrize("number", ROUNDS)
def test_one_slow_link_of_28_is_named(head: Head, made: list[Node], number: int) -> None:
    first, second = made[number % NODES], made[(number * 3 + 1) % NODES]
    if first is second:
        second = made[(number + 1) % NODES]
    write(head, made)
    for node, other in ((first, second), (second, first)):
        tc(node, "class add dev {dev} parent 1: classid 1:20 htb rate 40mbit quantum 60000")
        tc(node, f"filter add dev {{dev}} parent 1: protocol ip prio 1 u32 match ip dst {other.address} flowid 1:20")
    try:
        found = run_deep_check(head)
    finally:
        for node in (first, second):
            tc(node, "filter del dev {dev} parent 1: prio 1")
            tc(node, "class del dev {dev} classid 1:20")
    named = [f["message"] for f in found if f["status"] in ("FAIL", "WARN")]
    assert any(first.name in text + str(f) and second.name in str(f) for f in found for text in named), found
    assert list_blamed(found) <= {first.name, second.name, "None"}


@pytest.mark.parametrize("number", ROUNDS)
def test_one_slow_node_is_named(head: Head, made: list[Node], number: int) -> None:
    slow = made[number % NODES]
    write(head, made)
    with limited_cpus(made):
        found = run_deep_check(head, lambda: share_cpus(made, slow))
    assert list_named(found) == {slow.name}


@pytest.mark.parametrize("number", ROUNDS)
def test_a_node_that_computes_wrong_bits_is_named(head: Head, made: list[Node], number: int, lab: Lab) -> None:
    bad = made[number % NODES]
    folder = lab.shared / "wrong"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(WRONG_BITS)
    write(head, made, **{bad.name: {"PYTHONPATH": f"{SHARED}/wrong"}})
    assert list_blamed(run_deep_check(head)) == {bad.name}


@pytest.mark.parametrize("number", ROUNDS)
def test_a_node_with_half_its_memory_bandwidth_is_named(head: Head, made: list[Node], number: int) -> None:
    slow, neighbours = made[number % NODES], []

    def begin() -> None:
        share_cpus(made)
        # Three copiers take three quarters of the node's time at the memory, less what the scheduler gives back.
        neighbours.extend(slow.start(["python3", "-c", COPIES]) for _ in range(3))

    write(head, made)
    try:
        with limited_cpus(made):
            found = run_deep_check(head, begin)
    finally:
        # A kill of the Popen object would end only `nsenter`; its child would slow the node in the next round, too.
        slow.run(["pkill", "-9", "-f", "^python3 -c a = bytearray"])
        for neighbour in neighbours:
            neighbour.wait()
    assert list_named(found) == {slow.name}
