"""Whose GPUs are whose, as an ordinary user sees it on nodes that others use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests import fake_nvml
from tests.json_shapes import WHO, check
from tests.lab.gpu_node import SCENE, gpu_node
from tests.lab.head_cli import Head
from tests.lab.neighbour import Neighbour
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lab.lab import Lab
    from tests.lab.node import Node

GPUS = 4
STAY = "stay()  # \x1b]0;evil\x07"


@pytest.fixture(scope="module")
def nodes(lab: Lab) -> Iterator[list[Node]]:
    made = lab.add([gpu_node("ann"), replace(gpu_node("ann"), proc="hidepid=2")])
    yield made
    lab.remove(made)
    lab.end_head_processes()


@pytest.fixture
def head(nodes: list[Node], tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    hosts = [{"host": node.name, "gpus": [0], "workers": 1} for node in nodes]
    job = {"command": "exec python3 -c 'import clusterctl, time; clusterctl.progress(step=7); time.sleep(600)'"}
    document = {"version": 1, "name": "lab", "hosts": hosts, "sync": "none", "job": job}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(document))
    return Head(folder, head_env)


def shown_steps(head: Head, step: int) -> list[dict[str, Any]]:
    """What `who` shows once the run of every node has made this step, and nothing before."""
    told: list[dict[str, Any]] = head.json("who")
    steps = [holder["step"] for node in told for holder in node["holders"] if holder["kind"] == "run"]
    return told if steps == [step] * len(told) else []


def test_an_ordinary_user_sees_runs_and_processes_of_all_and_what_is_hidden_is_counted(
    head: Head, nodes: list[Node]
) -> None:
    neighbours = [Neighbour(node) for node in nodes]
    for number, (node, neighbour) in enumerate(zip(nodes, neighbours, strict=True)):
        neighbour.do(STAY)
        scene = fake_nvml.Scenario(node.path(SCENE), GPUS, node=number)
        scene.gpu(2, compute_procs=[{"pid": neighbour.pid, "used": 2**30}], mem_used=2**30, util=0)
    try:
        run = str(head.json("up", "-d", "--no-health")["run"])
        told: list[dict[str, Any]] = wait_for(lambda: shown_steps(head, 7), 60, "the steps of the run", 0.5)
        table = head.run("who")
        head.run("down", run)
    finally:
        for neighbour in neighbours:
            neighbour.leave()

    assert table.returncode == 0
    check(WHO, told)
    for node in told:
        (ours,) = (holder for holder in node["holders"] if holder["kind"] == "run")
        shown = {key: ours[key] for key in ("name", "user", "gpus", "workers", "is_here")}
        assert shown == {"name": run, "user": "ann", "gpus": [0], "workers": 1, "is_here": True}
    (seen,) = (holder for holder in told[0]["holders"] if holder["gpus"] == [2])
    assert (seen["kind"], seen["user"], seen["pids"]) == ("process", "uid 1502", [neighbours[0].pid])
    assert seen["name"].startswith("python3 -c ")
    assert told[0]["notes"] == []
    (hidden,) = (holder for holder in told[1]["holders"] if holder["gpus"] == [2])
    assert (hidden["kind"], hidden["user"], hidden["memory"]) == ("hidden", None, 2**30)
    assert told[1]["notes"] == ["1 process on GPU 2 cannot be named: of other users, or in containers"]
    assert "\x1b" not in table.stdout
    assert f"{nodes[1].name}: 1 process on GPU 2 cannot be named" in table.stdout
