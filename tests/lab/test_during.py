"""Trouble during a run, on real nodes whose GPUs a stand-in for NVIDIA's library plays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import pytest
import yaml

from tests import fake_nvml
from tests.json_shapes import STATUS, check
from tests.lab.gpu_node import SCENE, gpu_node
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

GPUS: Final = 8
QUICK: Final = {"during.interval": 1, "during.slowdown": 2, "during.clear_after": 2, "during.stuck": 2}
SLOW: Final = 40.0


class Machines:
    """Nodes with GPUs, and what they play."""

    def __init__(self, made: list[Node]) -> None:
        self.made = made
        self.names = [node.name for node in made]
        self.scenes = [fake_nvml.Scenario(node.path(SCENE), GPUS, node=i) for i, node in enumerate(made)]

    def write(self, head: Head, *, spares: int = 0, **more: Any) -> None:
        roles = ["worker"] * (len(self.made) - spares) + ["spare"] * spares
        hosts = [
            {"host": name, "gpus": GPUS, "workers": 1, "role": role}
            for name, role in zip(self.names, roles, strict=True)
        ]
        job = {"command": "echo begun; exec sleep 600", "grace": "1s"}
        health = {"thresholds": QUICK}
        document = {"version": 1, "name": "lab", "hosts": hosts, "sync": "none", "job": job, "health": health, **more}
        (head.folder / "cluster.yaml").write_text(yaml.safe_dump(document))


class Watched:
    """An `attach` that goes on while the test does something."""

    def __init__(self, head: Head, run: str, errors: IO[str]) -> None:
        argv = [sys.executable, "-m", "clusterctl", "attach", run]
        self.errors = errors
        self.process = subprocess.Popen(
            argv,
            cwd=head.folder,
            env=dict(head.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )

    def lines(self, words: str) -> list[str]:
        self.errors.seek(0)
        return [line.strip() for line in self.errors if words in line]

    def close(self) -> None:
        self.process.wait(SLOW)


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


@pytest.fixture
def watch(head: Head, tmp_path: Path) -> Iterator[Callable[[str], Watched]]:
    begun: list[Watched] = []

    def attach(run: str) -> Watched:
        begun.append(Watched(head, run, (tmp_path / "said").open("w+")))
        return begun[-1]

    yield attach
    for one in begun:
        one.process.kill()
        one.process.wait()
        one.errors.close()


def troubles(head: Head, run: str) -> list[str]:
    status = head.json("status", run)
    check(STATUS, status)
    return [trouble["message"] for trouble in status["health"]]


def test_a_gpu_that_slows_down_is_told_once_and_once_more_when_it_is_over(
    nodes: NodeFactory, head: Head, watch: Callable[[str], Watched]
) -> None:
    machines = Machines(nodes([gpu_node()] * 2))
    machines.write(head)
    first, second = machines.names
    run = str(head.json("up", "-d", "--no-health")["run"])
    seen = watch(run)

    machines.scenes[1].gpu(5, throttle=fake_nvml.HW_THERMAL, temp=84, util=97)
    (told,) = wait_for(lambda: troubles(head, run), SLOW, "the slowdown", 0.3)
    stats = {node["node"]: node for node in json.loads(head.run("stats", run, "--json").stdout)}
    picture = head.run("top", run).stdout
    machines.scenes[1].gpu(5, throttle=0, temp=40)
    wait_for(lambda: not troubles(head, run), SLOW, "its end", 0.3)

    assert told.startswith(f"{second} GPU 5: hardware thermal slowdown for ")
    assert told.endswith(", 84 °C")
    assert [list(stats), [len(node["gpus"]) for node in stats.values()]] == [[first, second], [GPUS, GPUS]]
    assert {"gpu": 5, "util": 97, "temp_c": 84, "power_w": 70.0}.items() <= stats[second]["gpus"][5].items()
    assert f"{second}: " not in picture
    assert [line.split()[0] for line in picture.splitlines() if line.startswith("n")].count(second) == GPUS

    # What happens to a node's driver and memory then must not keep the run from ending.
    machines.scenes[0].gpu(2, compute_procs=[{"pid": 1, "used": 3 << 30}], mem_used=3 << 30)
    machines.scenes[1].system(hang=["nvmlDeviceGetTemperature"])
    wait_for(lambda: seen.lines("the GPU driver hangs"), SLOW, "the hung driver", 0.3)
    down = head.run("down", run)
    seen.close()

    assert down.returncode == 0, down.stderr
    assert len(seen.lines("hardware thermal slowdown for")) == 1
    assert len(seen.lines("hardware thermal slowdown is over")) == 1
    (held,) = seen.lines("still in use")
    assert held.startswith(f"warn: {first} GPU 2: 3.0 of 80 GiB still in use, held by pid 1 (")
    assert len(seen.lines("the GPU driver hangs")) == 1


def test_one_odd_answer_ends_no_attempt_and_a_gpu_that_fell_off_the_bus_does(
    nodes: NodeFactory, head: Head, watch: Callable[[str], Watched]
) -> None:
    machines = Machines(nodes([gpu_node()] * 3))
    machines.write(head, spares=1, restart={"max_restarts": 1, "on": ["unhealthy"], "backoff": 0})
    first, sick, spare = machines.names
    run = str(head.json("up", "-d", "--no-health")["run"])
    seen = watch(run)

    odd = {"errors": {"nvmlDeviceGetTemperature": fake_nvml.times(2)}, "fields": {"230": 3}}
    machines.scenes[1].gpu(3, **odd)
    told = wait_for(lambda: troubles(head, run), SLOW, "the driver's wish", 0.3)
    assert told == [f"{sick} GPU 3: the driver recommends: drain P2P"]
    assert head.json("status", run)["attempt"] == 0
    # A scenario that is written anew would play its errors once more.
    machines.scenes[1].gpu(3, errors={})

    machines.scenes[1].system(events=[{"device": 5, "data": 79}])
    wait_for(lambda: head.json("status", run)["attempt"] == 1, SLOW, "another attempt", 0.3)
    status = wait_for(
        lambda: (s := head.json("status", run))["state"] == "running" and s, SLOW, "the run to go on", 0.3
    )
    # What the run held on the node that was replaced, others may have from now on.
    journal = Path(head.env["XDG_STATE_HOME"]) / "clusterctl/runs" / run / "nodes" / sick / "journal.jsonl"
    wait_for(lambda: '"kind":"finished"' in journal.read_text(), SLOW, "the end of the run on the replaced node", 0.3)
    head.run("down", run)
    seen.close()

    assert [node["node"] for node in status["nodes"]] == [first, spare]
    assert status["health"] == []
    why = "GPU 5: XID 79, GPU has fallen off the bus"
    assert seen.lines(f"unhealthy: {sick} {why} (reboot the node)")
    assert seen.lines(f"a node is unhealthy: stopping every worker ({sick}: {why})")
    assert seen.lines(f"{spare} takes the place of {sick}, which is unhealthy: {why}")
