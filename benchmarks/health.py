"""What looking costs: the probe on a node with eight GPUs, a look at many nodes, and the sampler beside a run."""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from benchmarks.lab import BenchLab, lab
from benchmarks.measures import Measure, spread, timed
from clusterctl.agent.facts.machine_sampler import INTERVAL_S
from clusterctl.agent.linux.helper_process import START_SCRIPT
from clusterctl.cli.node_sessions import open_reachable_sessions
from clusterctl.config.loader import load_cluster_file
from clusterctl.run.nodes.fan_out import Progress
from clusterctl.run.nodes.preflight import probe_nodes
from tests import fake_nvml
from tests.lab.gpu_node import SCENE, gpu_node
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.lab.node import Node

GPUS: Final = 8
MANY: Final = 32
_PASSES: Final = 20
_PASS_SECONDS: Final = 0.5
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the CPU of a probe and of a sampler's pass, and what `health` takes on one lab node and on many."""
    with lab(1, gpu_node()) as bench, tempfile.TemporaryDirectory() as folder:
        _write(bench)
        _look(bench)
        machine = _machine(Path(folder), bench.nodes[0])
        yield _probe(machine, rounds)
        yield _wall(bench, rounds)
        yield _sampler(machine)
    yield from _many_nodes(rounds)


@dataclass(frozen=True)
class _Machine:
    """This machine with GPUs that are played, and the agent as a node keeps it."""

    archive: Path
    env: dict[str, str]

    def agent(self, *arguments: str) -> list[str]:
        """Return the argv of a command of the agent."""
        return [sys.executable, "-c", START_SCRIPT, str(self.archive), *arguments]


def _machine(folder: Path, node: Node) -> _Machine:
    fake_nvml.program(folder / "bin", "dmesg", output="[    1.000000] Linux version 6.8.0\n")
    (kept,) = node.path(f"{node.spec.home}/.cache/clusterctl/agents").glob("*.pyz")
    archive = folder / kept.stem
    shutil.copytree(kept.with_suffix(""), archive)
    scene = fake_nvml.Scenario(folder / "scene.json", GPUS)
    env = {**os.environ, **scene.environment(), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    return _Machine(archive, env)


# --- the probe


def _probe(machine: _Machine, rounds: int) -> Measure:
    request = json.dumps({"workdir": "/tmp", "peers": {"other": "127.0.0.1"}, "deadline": 10})
    _cpu(machine.agent("facts"), request, machine.env)  # the first one writes the bytecode
    probes, starts = [], []
    for _ in range(rounds * 2):
        probes.append(_cpu(machine.agent("facts"), request, machine.env))
        starts.append(_cpu([sys.executable, "-c", "pass"], "", machine.env))
    beyond = statistics.median(probes) - statistics.median(starts)
    detail = f"probe {spread(probes)}, interpreter {spread(starts)} (CPU, {GPUS} GPUs played)"
    return Measure(
        name="CPU of a probe beyond the interpreter's start", value=beyond, unit="s", goal=0.1, detail=detail
    )


def _cpu(argv: Sequence[str], stdin: str, env: dict[str, str]) -> float:
    """Return the CPU seconds of a program and of everything it waited for."""
    before = _children()
    subprocess.run(argv, input=stdin, env=env, stdout=subprocess.DEVNULL, text=True, check=True)
    return _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- the sampler


def _sampler(machine: _Machine) -> Measure:
    argv = machine.agent("sampler", str(_PASS_SECONDS))
    with subprocess.Popen(argv, env=machine.env, stdout=subprocess.PIPE, text=True) as sampler:
        assert sampler.stdout is not None
        sampler.stdout.readline()
        before = _of_tree(sampler.pid)
        for _ in range(_PASSES):
            sampler.stdout.readline()
        a_pass = (_of_tree(sampler.pid) - before) / _PASSES
        sampler.terminate()
    share = 100 * a_pass / INTERVAL_S
    detail = f"{1000 * a_pass:.1f} ms of CPU a pass, one in {INTERVAL_S:g} s, {GPUS} GPUs played"
    return Measure(name="sampler, share of a core", value=share, unit="%", goal=0.5, detail=detail)


def _of_tree(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that live."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return _of_process(pid) + sum(_of_process(int(child)) for child in children)


def _of_process(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, words[11:13])) / _TICKS


# --- nodes


def _wall(bench: BenchLab, rounds: int) -> Measure:
    """Time what the preflight waits for once its connections are there."""
    spec = load_cluster_file([str(bench.head.folder / "cluster.yaml")], environ=os.environ).spec
    with open_reachable_sessions(spec, spec.hosts) as (sessions, _):
        step = Progress("health", 1, lambda _: None)
        walls = [timed(lambda: probe_nodes(spec, sessions, step)) for _ in range(rounds * 2)]
    detail = f"{spread(walls)} ({GPUS} GPUs played)"
    return Measure(
        name="probe on a healthy lab node, wall", value=statistics.median(walls), unit="s", goal=0.4, detail=detail
    )


def _many_nodes(rounds: int) -> Iterable[Measure]:
    with lab(MANY, gpu_node()) as bench:
        _write(bench)
        _look(bench)
        heads, nodes, walls = [], [], []
        for _ in range(max(2, rounds // 2)):
            _quiet(bench.nodes)
            at_nodes, at_head, began = sum(map(_of_node, bench.nodes)), _children(), time.perf_counter()
            _look(bench)
            walls.append(time.perf_counter() - began)
            heads.append((_children() - at_head) / MANY)
            _quiet(bench.nodes)
            nodes.append((sum(map(_of_node, bench.nodes)) - at_nodes) / MANY)
    detail = f"wall {spread(walls)} for all of {MANY} nodes on {os.cpu_count()} cores"
    yield Measure(
        name=f"health of {MANY} nodes, CPU a node: head", value=statistics.median(heads), unit="s", detail=detail
    )
    yield Measure(name=f"health of {MANY} nodes, CPU a node: node", value=statistics.median(nodes), unit="s")


def _write(bench: BenchLab) -> None:
    for number, node in enumerate(bench.nodes):
        fake_nvml.Scenario(node.path(SCENE), GPUS, node=number)
    hosts = [{"host": name, "gpus": GPUS} for name in bench.names]
    document = {"version": 1, "name": "bench", "hosts": hosts, "health": {"thresholds": {"probe.deadline": 60}}}
    (bench.head.folder / "cluster.yaml").write_text(yaml.safe_dump(document))


def _look(bench: BenchLab) -> None:
    bench.ours("health", "--json")


def _quiet(nodes: Sequence[Node]) -> None:
    wait_for(lambda: not any(node.leftovers() for node in nodes), what="the agents to be gone")


def _of_node(node: Node) -> float:
    """Return the CPU seconds of a node's sshd and PID 1, with all that they have waited for."""
    sshd = int(node.path("/run/sshd.pid").read_text())
    stats = [node.path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in (1, sshd)]
    return sum(sum(map(int, words[11:15])) for words in stats) / _TICKS
