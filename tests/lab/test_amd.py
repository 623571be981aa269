"""A run on nodes with AMD GPUs, from files that say what their driver would."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from tests.json_shapes import STATUS, check
from tests.lab.amd_node import files, give_gpus
from tests.lab.head_cli import Head
from tests.lab.spec import NodeSpec
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lab.lab import Lab
    from tests.lab.node import Node

GPUS: Final = 2
SLOW: Final = 40.0
NVIDIAS: Final = {"gpu.xid", "gpu.nvlink", "gpu.persistence", "gpu.recovery_action", "gpu.lib_mismatch"}


@dataclass(frozen=True)
class Pair:
    """Two nodes, and what their GPUs tell."""

    made: list[Node]
    groups: list[dict[str, Any]]

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.made]

    def put(self, node: int, gpu: int, name: str, text: str) -> None:
        """Let a file of a GPU say something else."""
        (files(self.made[node], self.groups[node]["devices"][gpu]) / name).write_text(text + "\n")


@pytest.fixture(scope="module")
def pair(lab: Lab) -> Iterator[Pair]:
    made = lab.add([NodeSpec()] * 2)
    yield Pair(made, [give_gpus(node, GPUS, number) for number, node in enumerate(made)])
    lab.remove(made)
    lab.end_head_processes()


@pytest.fixture
def head(pair: Pair, tmp_path: Path, head_env: dict[str, str]) -> Head:
    """A head whose file says nothing of the first node's GPUs and chooses one of the second's."""
    folder = tmp_path / "project"
    folder.mkdir()
    hosts = [{"host": pair.names[0]}, {"host": pair.names[1], "gpus": [1]}]
    job = {"command": 'echo "visible=$HIP_VISIBLE_DEVICES order=$CUDA_DEVICE_ORDER"; exec sleep 600', "grace": "1s"}
    health = {"thresholds": {"during.interval": 1}}
    document = {"version": 1, "name": "lab", "hosts": hosts, "sync": "none", "job": job, "health": health}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(document))
    return Head(folder, head_env)


@pytest.fixture
def run(head: Head) -> Iterator[str]:
    run = str(head.json("up", "-d", "--no-health")["run"])
    yield run
    assert head.run("down", run).returncode == 0


def test_gpus_of_amd_are_judged_and_what_nvidia_alone_has_is_not(head: Head) -> None:
    judged = json.loads(head.run("health", "--json", "--record", "health.json").stdout)
    first = {f["check"]: f for f in judged["nodes"][0]["findings"]}
    assert {first[name]["status"] for name in NVIDIAS} == {"SKIP"}
    assert {first[name]["status"] for name in ("gpu.count", "gpu.xgmi", "gpu.temperature", "gpu.bad_pages")} == {"PASS"}
    assert "/dev/kfd" in first["gpu.device_access"]["message"]
    replayed = json.loads(head.run("health", "--json", "--replay", "health.json").stdout)
    assert [n["verdict"] for n in replayed["nodes"]] == [n["verdict"] for n in judged["nodes"]]


def test_auto_counts_gpus_of_amd_and_a_worker_sees_those_that_the_file_chose(head: Head, pair: Pair, run: str) -> None:
    status = head.json("status", run)
    check(STATUS, status)
    assert [worker["node"] for worker in status["workers"]] == [pair.names[0], pair.names[0], pair.names[1]]

    def seen() -> list[tuple[str, str]] | None:
        found = re.findall(
            r"visible=(\d*) order=(\w*)", head.run("logs", run, "--all-ranks", "--format", "json").stdout
        )
        return sorted(found) if len(found) == 3 else None

    assert wait_for(seen, SLOW, "the words of three ranks") == [("", ""), ("", ""), ("1", "")]


def test_stats_and_top_show_gpus_of_amd_whether_nodes_or_a_run_are_asked(head: Head, pair: Pair, run: str) -> None:
    pair.put(1, 1, "gpu_busy_percent", "97")
    gpu = {"gpu": 1, "util": 97, "temp_c": 43, "power_w": 134.0, "mem_total": 206141652992}

    def busy(*of: str) -> list[dict[str, Any]]:
        told = json.loads(head.run("stats", "--json", *of).stdout)
        return [g for node in told for g in node["gpus"] if g["util"]]

    for of in ((run,), ("cluster.yaml",)):
        (found,) = wait_for(lambda of=of: busy(*of), SLOW, "a busy GPU")
        assert gpu.items() <= found.items()
    assert " 97%" in head.run("top", run).stdout


def test_errors_of_a_gpu_of_amd_during_a_run_are_told(head: Head, pair: Pair, run: str) -> None:
    wait_for(lambda: json.loads(head.run("stats", run, "--json").stdout)[1]["gpus"], SLOW, "the first sample")
    pair.put(1, 1, "ras/aca_umc", "ue: 2\nce: 0")
    (trouble,) = wait_for(lambda: head.json("status", run)["health"], SLOW, "the errors")
    told = (trouble["node"], trouble["gpu"], trouble["check"], trouble["action"])
    assert told == (pair.names[1], 1, "gpu.ecc_uncorrected", "RESET_GPU")
