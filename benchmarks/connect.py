"""Reaching 32 lab nodes: the head's CPU time per node from connecting to the agent's hello, and the wall clock."""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import subprocess
import sys
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from benchmarks.lab import BenchLab, lab
from benchmarks.measures import Measure, spread, timed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.session.controller_inbox import InboxItem

NODES = 32


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the CPU time per node, and the wall clock against as many ssh at once."""
    cpu, children, ours, peer = [], [], [], []
    with lab(NODES) as bench:
        bench.write_hosts()
        for number in range(rounds + 1):
            found = _connect(bench)
            seconds = timed(lambda: _ssh(bench))
            if number:  # the first one brings the agent there
                cpu.append(found["cpu"] / NODES)
                children.append(found["children"] / NODES)
                ours.append(found["wall"])
                peer.append(seconds)
    yield Measure(
        name=f"head's CPU per node, connect to hello ({NODES} nodes)",
        value=1000 * statistics.median(cpu),
        unit="ms",
        goal=10,
        detail=f"{spread(cpu)}; beside it `ssh -G` {1000 * statistics.median(children):.1f} ms",
    )
    yield Measure(
        name=f"connect to hello on {NODES} nodes / parallel ssh true",
        value=statistics.median(ours) / statistics.median(peer),
        detail=f"{spread(ours)}; ssh {spread(peer)}",
    )


def _connect(bench: BenchLab) -> dict[str, Any]:
    argv = [sys.executable, "-m", "benchmarks.connect", str(bench.head.folder / "cluster.yaml")]
    done = subprocess.run(argv, env=dict(bench.env), stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _ssh(bench: BenchLab) -> None:
    bench.ssh_loop([(name, "true") for name in bench.names]).wait()


def connect(path: str) -> dict[str, float]:
    """Open sessions with the hosts of a cluster file; return wall clock and CPU, own and of children."""
    from clusterctl.config.loader import load_cluster_file
    from clusterctl.session.connect import Transports, open_sessions
    from clusterctl.transport.agent_archive import load_agent_archive

    spec = load_cluster_file([path], environ={}).spec
    importlib.import_module(
        "clusterctl.transport.ssh.paramiko_transport"
    )  # which is done once, however many nodes there are
    load_agent_archive()
    inbox: SimpleQueue[InboxItem] = SimpleQueue()
    own, below = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    cpu, children, began = _cpu(own), _cpu(below), time.perf_counter()
    sessions, errors = open_sessions(Transports(spec.ssh), spec.hosts, inbox)
    found = {"cpu": _cpu(own) - cpu, "children": _cpu(below) - children, "wall": time.perf_counter() - began}
    if errors:
        raise next(iter(errors.values()))
    for session in sessions.values():
        session.close()
    return found


def _cpu(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    print(json.dumps(connect(sys.argv[1])))
