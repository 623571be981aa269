"""A recording tells nobody whose machines it is of, and is judged as the machines themselves."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.errors import RefusedError
from clusterctl.health.anonymizer import Anonymizer
from clusterctl.health.fact_recording import judge_recording, make_recording, read_recording
from clusterctl.health.findings import Status
from clusterctl.health.judge import judge_all
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health import healthy
from tests.unit.health.healthy import changed, log
from tests.unit.health.machines import amd, shapes
from tests.unit.health.test_checks import CASES, base
from tests.unit.health.test_machines import FAULTS

Facts = dict[str, dict[str, Any]]
SHAPES: dict[str, Any] = {**shapes.SHAPES, **amd.SHAPES}


def sent(told: Facts, settings: HealthSettings, *reached_as: str) -> str:
    return json.dumps(make_recording(told, settings, reached_as))


def verdicts(told: Facts, settings: HealthSettings) -> Counter[Any]:
    """What is found, without the words, in which names may stand; nodes by their place."""
    place = {node: i for i, node in enumerate(settings.nodes)}
    found = judge_all(told, settings)
    return Counter(
        (f.check, f.status, f.action, f.gpu, place.get(f.node or ""), f.ignored, f.needs_root) for f in found
    )


def is_judged_alike(told: Facts, settings: HealthSettings) -> bool:
    facts, promises = read_recording(json.loads(sent(told, settings)))
    return verdicts(facts, promises) == verdicts(told, settings)


# --- judged alike


@pytest.mark.parametrize("name", SHAPES)
def test_a_machine_of_any_shape_is_judged_as_before_and_so_is_its_fault(name: str) -> None:
    shape = SHAPES[name]
    told = {f"gpu0{i}": shape.facts(i) for i in range(3)}
    if name in FAULTS:
        told["gpu01"] = changed(told["gpu01"], **FAULTS[name][0])
    nodes = {node: NodeDeclaration(gpus=len(shape.gpus), workdir="/home/byron/secret") for node in told}
    assert is_judged_alike(told, HealthSettings(nodes=nodes, expect=shape.expect, framework="torch"))


@pytest.mark.parametrize("name", CASES)
def test_whatever_a_check_finds_it_finds_in_a_recording(name: str) -> None:
    case = CASES[name]
    everywhere = {**case.everywhere, **case.good}
    told = {f"gpu0{i}": changed(base(name, i), **everywhere) for i in range(4)}
    told["gpu01"] = changed(told["gpu01"], **case.bad)
    nodes = {node: NodeDeclaration(gpus=8) for node in told}
    assert is_judged_alike(told, HealthSettings(nodes=nodes, expect=case.expect))


def test_promises_and_tolerances_are_those_of_the_cluster_file() -> None:
    told = {f"gpu0{i}": changed(healthy.facts(i), host__load1=9999.0, gpu2__temp=99, gpu2__margin=-9) for i in range(3)}
    settings = HealthSettings(
        nodes={"gpu00": NodeDeclaration(gpus=(2, 3)), "gpu01": NodeDeclaration(), "gpu02": NodeDeclaration(gpus=8)},
        spares=frozenset({"gpu02"}),
        expect={"mounts": ["/data/secret"], "allowed_procs": ["python"]},
        ignore=("gpu.temp*@gpu01", "net.*"),
        severity={"host.load": "fail"},
        required=("gpu.xid",),
        thresholds={"host.shm.warn": 1.0},
        framework="torch",
    )
    assert is_judged_alike(told, settings)
    assert sum(f.ignored for f in judge_recording(json.loads(sent(told, settings)))[1]) > 0


def test_ranks_and_settings_of_one_host_are_those_of_the_cluster_file() -> None:
    small = {"host__shm": {"total": 64 << 20, "free": 64 << 20}}
    told = {f"gpu0{i}": changed(healthy.facts(i), **small, host__env_hashes__NCCL_X=str(i)) for i in range(3)}
    for expected in (NodeDeclaration(workers=1), NodeDeclaration(env=frozenset({"NCCL_X"})), NodeDeclaration()):
        assert is_judged_alike(told, HealthSettings(nodes=dict.fromkeys(told, expected)))


def test_ways_between_nodes_and_lost_runs_name_nobody() -> None:
    way = {"from": "gpu00", "to": "gpu01", "address": "203.0.113.7", "port": 1, "ok": False, "error": "refused"}
    told = {"gpu00": changed(healthy.facts(0), controller__ring=[way], controller__rebooted_under="moonshot-x7f2")}
    facts, _ = read_recording(
        json.loads(sent(told, HealthSettings(nodes={n: NodeDeclaration() for n in ("gpu00", "gpu01")})))
    )
    (seen,) = facts["node1"]["controller"]["ring"]
    assert (seen["from"], seen["to"]) == ("node1", "node2")
    assert seen["address"].startswith("10.0.")
    assert facts["node1"]["controller"]["rebooted_under"] == "run1"


def test_a_node_that_was_not_reached_or_not_looked_at_is_so_in_a_recording() -> None:
    told = {"gpu00": healthy.facts(), "gpu01": {"unreachable": "gpu01: no route to 10.1.2.3"}}
    settings = HealthSettings(nodes={name: NodeDeclaration() for name in ("gpu00", "gpu01", "gpu02")})
    facts, promises = read_recording(json.loads(sent(told, settings)))
    assert (list(facts), list(promises.nodes)) == (["node1", "node2"], ["node1", "node2", "node3"])
    assert facts["node2"] == {"unreachable": "node2: no route to 10.0.0.3"}


# --- nobody is named


TELLING = {
    "host__user": "byron",
    "host__machine_id": "0d1e2f3a4b5c6d7e8f90a1b2c3d4e5f6",
    "host__boot_id": "b58e6b85-8855-4300-8530-66f84f690289",
    "host__env": {"NCCL_TOPO_FILE": "/home/byron/moonshot/topo.xml", "CUDA_API_TOKEN": "hunter2hunter2", "HSA_X": "1"},
    "names__hostname": "gpu00.lovelace.example",
    "names__addresses": ["203.0.113.77", "2001:db8::77", "127.0.1.1"],
    "names__peers": {"gpu01": {"name": "gpu01-ib.lovelace.example", "addresses": ["203.0.113.78"], "error": None}},
    "mounts__paths": [
        {
            "path": "/data/moonshot",
            "fs": "nfs4",
            "device": "vault.lovelace.example:/export/moonshot",
            "status": "timeout",
            "reason": "no answer from vault (a0:36:9f:77:77:77) for /data/moonshot",
            "ms": 3000.0,
        }
    ],
    "versions__executable": "/home/byron/moonshot/.venv/bin/python3.12",
    "procs__runs": [{"run": "moonshot-x7f2", "pid": 77, "comm": "python"}],
    "controller__own_run": "moonshot-x7f2",
    "kernel_log": log("nfs: server vault not responding, 203.0.113.99"),
    "gpu1__serial": "1654321098765",
    "gpu1__uuid": "GPU-6f7e8d9c-1234-5678-9abc-def012345678",
}
NAMES = re.split(
    " ",
    "byron moonshot lovelace vault gpu00 gpu01 hunter2 203.0.113 2001:db8 a0:36:9f 1654321098765 6f7e8d9c 0d1e2f3a "
    "b58e6b85 x7f2",
)


def test_nothing_tells_whose_machines_they_are() -> None:
    told = {"gpu00": changed(healthy.facts(0), **TELLING), "gpu01": {"unreachable": "byron@gpu01-ib: refused"}}
    nodes = {node: NodeDeclaration(workdir="/home/byron/moonshot") for node in told}
    settings = HealthSettings(nodes=nodes, expect={"mounts": ["/data/moonshot"]}, ignore=("host.*@gpu01",))
    plain = json.dumps([told, {"mounts": ["/data/moonshot"]}])
    assert [name for name in NAMES if name not in plain] == []
    text = sent(told, settings, "gpu01-ib", "gpu01-ib.lovelace.example")
    assert [name for name in NAMES if name in text] == []
    assert is_judged_alike(told, settings)


def test_what_a_verdict_rests_on_stays() -> None:
    versions = {"versions__names": {"nvidia-cudnn": "9.1.0.70"}, "net__ib__0__firmware": "28.39.10.2"}
    told = {"gpu00": changed(healthy.facts(), **TELLING, **versions)}
    facts = judge_recording(json.loads(sent(told, HealthSettings(nodes={"gpu00": NodeDeclaration()}))))[0]["node1"]
    old, new = told["gpu00"]["groups"], facts["groups"]
    for group in ("driver", "disk", "procs", "ports"):
        assert {**new[group]["data"], "runs": None, "paths": None} == {
            **old[group]["data"],
            "runs": None,
            "paths": None,
        }
    kept = {"uuid": None, "serial": None}
    for before, after in zip(old["nvml"]["data"]["devices"], new["nvml"]["data"]["devices"], strict=True):
        assert {**before["v"], **kept} == {**after["v"], **kept}
    assert new["nvml"]["data"]["nvml"] == "12.570.86.15"
    assert new["versions"]["data"]["names"] == {"nvidia-cudnn": "9.1.0.70"}
    assert new["net"]["data"]["ib"] == old["net"]["data"]["ib"]
    assert new["versions"]["data"]["executable"] == "/home/folder1/folder2/.venv/bin/python3.12"
    assert new["names"]["data"]["addresses"][2] == "127.0.1.1"
    assert "python" in json.dumps(new["procs"])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0000:10:00.0", "0000:10:00.0"),
        ("PCI:00000000:05:00.0 at 12:34:56", "PCI:00000000:05:00.0 at 12:34:56"),
        ("fe80::1%eth0 and ::1", "fe80::1%eth0 and ::1"),
        ("10.1.2.3:29500", "10.0.0.1:29500"),
        ("8/8 lanes, 400 Gb/sec", "8/8 lanes, 400 Gb/sec"),
        ("/dev/nvidia0 and /", "/dev/nvidia0 and /"),
        ("/dev/mapper/vg_byron", "/dev/folder1/folder2"),
        ("[Errno 2] No such file: '/scratch/byron/x'", "[Errno 2] No such file: '/scratch/folder1/folder2'"),
        ("gpu07.lovelace.example: gone", "node1: gone"),
        ("amdgpu07 and gpu070", "amdgpu07 and gpu070"),
        ("GPU-00000000-0000-0000-0000-000000000000", "GPU-00000000-0000-0000-0000-000000000000"),
    ],
)
def test_a_text_is_shown_as(text: str, shown: str) -> None:
    assert Anonymizer(["gpu07"], [], {}).anonymize_text(text) == shown


def test_what_every_machine_has_stays() -> None:
    disguise = Anonymizer(["localhost", "gpu07"], [], {"user": "root"})
    assert disguise.anonymize({"user": "root", "error": "gpu07: root@localhost"}) == {
        "user": "root",
        "error": "node1: root@localhost",
    }


@pytest.mark.parametrize("node", ["host", "nvml", "ok", "n1", "root", "workdir", "ACTIVE", "tsc", "nvidia"])
def test_a_node_may_be_called_what_facts_are_made_of(node: str) -> None:
    assert is_judged_alike({node: healthy.facts()}, HealthSettings(nodes={node: NodeDeclaration(gpus=8)}))


words = st.text("abcdefghij0123456789-", min_size=3, max_size=12).filter(lambda w: w[0].isalpha() and w[-1] != "-")


@given(st.lists(words, min_size=2, max_size=6, unique=True))
def test_different_nodes_stay_different(nodes: list[str]) -> None:
    told = {node: healthy.facts(i, gpus=0) for i, node in enumerate(nodes)}
    settings = HealthSettings(nodes={node: NodeDeclaration() for node in nodes})
    facts, promises = read_recording(json.loads(sent(told, settings)))
    assert len(facts) == len(promises.nodes) == len(nodes)


# --- what others send


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "not a recording"),
        ({"nodes": []}, "not a recording"),
        ({"recording": 2, "version": "9.9.9"}, "format 2, written by clusterctl 9.9.9"),
        ({"recording": 1}, "damaged"),
        ({"recording": 1, "nodes": 7}, "damaged"),
    ],
)
def test_what_is_no_recording_is_refused(value: Any, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        judge_recording(value)


@pytest.mark.parametrize("facts", [{"groups": 7}, {"groups": {"nvml": {"status": "ok", "data": 7}}}, 7, "x"])
def test_damaged_facts_are_refused(facts: Any) -> None:
    value = make_recording({"gpu00": healthy.facts()}, HealthSettings(nodes={"gpu00": NodeDeclaration()}))
    value["nodes"][0]["facts"] = facts
    with pytest.raises(RefusedError, match="damaged"):
        judge_recording(value)


def test_a_recording_of_all_that_is_asked_for_is_small() -> None:
    told = {f"gpu{i:02d}": healthy.facts(i) for i in range(8)}
    text = sent(told, HealthSettings(nodes={node: NodeDeclaration() for node in told}))
    assert len(text) < 32768 * len(told)
    assert all(f.status is not Status.FAIL for f in judge_recording(json.loads(text))[1])
