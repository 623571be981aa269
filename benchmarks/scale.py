"""What a head needs for many nodes: `python -m benchmarks scale --nodes 32,128,512,1000`, on simulated ones.

The head is wholly real: `up`, its controller, `ssh -G` and SSH for each node; the nodes are one process
(`benchmarks.simulated`). What the controller takes of the processor is counted, not the time on the wall, so that a
busy machine changes little. Nodes are not probed (`--no-health`) and get no code: both is work of the nodes, mostly.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.measures import Measure
from benchmarks.simulated import address_of
from clusterctl.run.record import state_reader
from clusterctl.run.record.state_reader import load_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState

SIZES = (32, 128)
SECONDS = 10.0
LINES = 10_000
PATIENCE = 900.0
READERS = {"ps": ("ps",), "status": ("status",), "logs": ("logs", "--tail", "20", "--rank", "0"), "why": ("why",)}


@dataclass(frozen=True)
class Taken:
    """What a process has taken so far: processor time of its own and of its children (`ssh -G`), in seconds."""

    cpu: float
    children: float
    wall: float


class Simulation:
    """Simulated nodes, and a head that knows how to reach them."""

    def __init__(self, folder: Path, count: int, files: int | None) -> None:
        self.count, self.folder = count, folder
        argv = [sys.executable, "-m", "benchmarks.simulated", "--nodes", str(count), "--folder", str(folder)]
        self._nodes = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._nodes.stdout is not None
        self._nodes.stdout.readline()
        hosts = [{"host": f"sim{n:04}", "address": address_of(n), "workers": 1, "gpus": 0} for n in range(count)]
        document = {
            "version": 1,
            "name": "scale",
            "hosts": hosts,
            "ssh": {"connect_timeout": "10m", "parallel": 16},
            "sync": "none",
            "job": {"command": ["true"], "framework": "none"},
        }
        # What is JSON is YAML, too.
        (folder / "cluster.yaml").write_text(json.dumps(document))
        env = {"XDG_STATE_HOME": str(folder / "state"), "CLUSTERCTL_SSH_CONFIG": str(folder / "ssh_config")}
        self._env = {**os.environ, **env}
        self._files = files

    def ask(self, *words: object) -> dict[str, Any]:
        """Tell the nodes something; return what they count."""
        assert self._nodes.stdin is not None
        assert self._nodes.stdout is not None
        self._nodes.stdin.write(" ".join(map(str, words)) + "\n")
        self._nodes.stdin.flush()
        told: dict[str, Any] = json.loads(self._nodes.stdout.readline())
        return told

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command of clusterctl."""
        argv = [sys.executable, "-m", "clusterctl", *arguments]
        if self._files is not None:
            argv = ["sh", "-c", f'ulimit -n {self._files}; exec "$@"', "sh", *argv]
        said = (self.folder / "said").open("ab")
        return subprocess.Popen(
            argv, env=self._env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )

    def run(self) -> RunDir:
        """Return the run, once there is one."""
        root = self.folder / "state" / "clusterctl" / "runs"
        found: RunDir = wait("a run", lambda: next(iter(state_reader.list_runs(root)), None))
        return found

    def close(self) -> None:
        """End the nodes, and controllers that are left."""
        for run in state_reader.list_runs(self.folder / "state" / "clusterctl" / "runs"):
            if run.is_attended and run.last_controller is not None:
                psutil.Process(run.last_controller.pid).kill()
        self._nodes.kill()
        self._nodes.wait()


def wait(what: str, look: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Return what `look` finds, as soon as it finds it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.25)
    raise RuntimeError(f"{what}: not seen in {seconds:g} s")


def taken(process: psutil.Process) -> Taken:
    times = process.cpu_times()
    return Taken(times.user + times.system, times.children_user + times.children_system, time.monotonic())


@contextlib.contextmanager
def simulation(count: int, files: int | None = None) -> Iterator[Simulation]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made = Simulation(Path(folder), count, files)
        try:
            yield made
        finally:
            made.close()


def measure(rounds: int, sizes: Sequence[int] = SIZES, files: int | None = None) -> Iterable[Measure]:
    """Yield what the controller takes with so many nodes; one start of each size, so `rounds` is of no matter."""
    del rounds
    for count in sizes:
        with simulation(count, files) as nodes:
            yield from _of(nodes)


def _of(nodes: Simulation) -> Iterable[Measure]:
    up = nodes.start("up", "-d", "--no-health", "cluster.yaml")
    run = nodes.run()
    pid = wait("a controller", lambda: run.last_controller).pid
    process = psutil.Process(pid)
    began = time.monotonic()
    yield from _start(nodes, run, process, began)
    up.wait()
    yield from _steady(nodes, process)
    yield from _readers(nodes)
    for gone in sorted({1, min(10, nodes.count // 2), nodes.count // 2}):
        yield from _failure(nodes, run, process, gone)
    nodes.start("down", "--kill", run.run).wait()


def _start(nodes: Simulation, run: RunDir, process: psutil.Process, began: float) -> Iterable[Measure]:
    wait("all started", lambda: _started(nodes, load_state(run), process))
    used, count = taken(process), nodes.count
    seconds = time.monotonic() - began
    memory = process.memory_info().rss / 2**20
    detail = f"{seconds:.1f} s on the wall, load {os.getloadavg()[0]:.0f}; `ssh -G` {used.children:.1f} s beside it"
    yield _measure(count, "controller's CPU until all have started", used.cpu, "s", 60 * max(1.0, count / 1000), detail)
    yield _measure(count, "the same for each node", 1000 * used.cpu / count, "ms")
    yield _measure(count, "memory", memory, "MB", 1000)
    yield _measure(count, "threads", process.num_threads(), "")
    yield _measure(count, "descriptors", process.num_fds(), "")


def _started(nodes: Simulation, state: RunState, process: psutil.Process) -> bool:
    if state.is_over or not process.is_running():
        raise RuntimeError(f"the run has ended: {(nodes.folder / 'said').read_text()[-2000:]}")
    return len(state.workers) == nodes.count and state.phase.value == "running"


def _steady(nodes: Simulation, process: psutil.Process) -> Iterable[Measure]:
    yield _measure(nodes.count, "cores, quiet", _cores(process), "", 0.5)
    before = nodes.ask("chat", LINES)["lines"]
    time.sleep(2.0)
    began, used = time.monotonic(), _cores(process)
    told = nodes.ask("chat", 0)["lines"] - before
    detail = f"{told / (time.monotonic() - began + 2.0):.0f} lines/s were written"
    yield _measure(nodes.count, f"cores at {LINES} lines a second", used, "", 1.0, detail)


def _cores(process: psutil.Process) -> float:
    before = taken(process)
    time.sleep(SECONDS)
    after = taken(process)
    return (after.cpu - before.cpu + after.children - before.children) / (after.wall - before.wall)


def _readers(nodes: Simulation) -> Iterable[Measure]:
    for name, arguments in READERS.items():
        cpu, wall = [], []
        for _ in range(3):
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            nodes.start(*arguments).wait()
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall.append(time.monotonic() - began)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        yield _measure(nodes.count, f"CPU of `{name}`", statistics.median(cpu), "s", None, f"{min(wall):.2f} s at best")


def _failure(nodes: Simulation, run: RunDir, process: psutil.Process, gone: int) -> Iterable[Measure]:
    before, began = taken(process), time.monotonic()
    nodes.ask("drop", gone)
    wait("all that were cut off", lambda: _away(run) == gone, 120.0)
    seen = time.monotonic() - began
    time.sleep(SECONDS)
    nodes.ask("back")
    wait("all back", lambda: _away(run) == 0, 300.0)
    after = taken(process)
    detail = f"all seen after {seen:.1f} s; the end of it {after.wall - before.wall - seen:.1f} s later"
    used = after.cpu - before.cpu + after.children - before.children
    yield _measure(nodes.count, f"CPU for {gone} nodes that go and come back", used, "s", None, detail)


def _away(run: RunDir) -> int:
    return sum(node.link == "unreachable" for node in load_state(run).nodes.values())


def _measure(count: int, name: str, value: float, unit: str, goal: float | None = None, detail: str = "") -> Measure:
    return Measure(name=f"{count} nodes: {name}", value=value, unit=unit, goal=goal, detail=detail)
