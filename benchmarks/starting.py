"""How soon the program is there: `--help` against importing click; `ps` and `status` of a run on 200 nodes."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measures import Measure, alternate, spread
from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol import run_files
from clusterctl.run.record import rundir
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.rules import controller_events

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NODES = 200
RANKS = 8


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the ratio of `clusterctl --help` to `python -c 'import click'`, and how long reading a large run takes."""
    with tempfile.TemporaryDirectory() as state:
        env = {**os.environ, "XDG_STATE_HOME": state}
        large_run(Path(state) / "clusterctl" / "runs", NODES)
        cpu: dict[str, list[float]] = {"ps": [], "status": []}
        samples = alternate(
            rounds * 2,
            ours=lambda: _run(env, "-m", "clusterctl", "--help"),
            peer=lambda: _run(env, "-c", "import click"),
            ps=lambda: cpu["ps"].append(_run(env, "-m", "clusterctl", "ps")),
            status=lambda: cpu["status"].append(_run(env, "-m", "clusterctl", "status")),
        )
    ratio = statistics.median(samples["ours"]) / statistics.median(samples["peer"])
    detail = f"{spread(samples['ours'])}; click {spread(samples['peer'])}"
    yield Measure(name="clusterctl --help / import click", value=ratio, goal=1.5, detail=detail)
    for command, used in cpu.items():
        yield Measure(
            name=f"{command} of {NODES} nodes x {RANKS} ranks",
            value=statistics.median(samples[command]),
            unit="s",
            goal=0.30,
            detail=f"{spread(samples[command])}; CPU {spread(used)}",
        )


def large_run(root: Path, nodes: int) -> rundir.RunDir:
    """Write the run directory of a run that goes on, as its controller keeps it."""
    root.mkdir(parents=True)
    run = rundir.create_run_dir("large", root)
    writer = RunDirWriter(run)
    places = [
        {"node": f"n{i}", "node_rank": i, "address": "10.0.0.1", "ranks": [*range(i * RANKS, (i + 1) * RANKS)]}
        for i in range(nodes)
    ]
    writer.append(controller_events.RunCreated(run=run.run, name="large", path="/cluster.yaml"), 1.0)
    attempt = controller_events.AttemptStarted(
        attempt=0, world_size=nodes * RANKS, master_addr="10.0.0.1", master_port=29500, nodes=places
    )
    writer.append(attempt, 2.0)
    for place in places:
        _node(writer, str(place["node"]), place["ranks"])  # type: ignore[arg-type]
    writer.close()
    return run


def _node(writer: RunDirWriter, node: str, ranks: list[int]) -> None:
    told: list[node_events.Event] = [node_events.Prepared(0, [29500])]
    told += [node_events.Started(0, rank, local, 700 + rank, 8) for local, rank in enumerate(ranks)]
    for seq, event in enumerate(told, 1):
        writer.append_node_event(
            node, json.loads(node_events.encode_event(node_events.Stamp(seq, 2.0, 2.0, "boot"), event))
        )
    inside = {str(rank): {"alive": True, "inside": {"step": 7}} for rank in ranks}
    sample = json.dumps({"kind": "activity", "t": 3.0, "m": 3.0, "attempt": 0, "ranks": inside})
    writer.replicate(node, run_files.SAMPLES_FILE, 0, f"{sample}\n".encode() * 20)
    for rank in ranks:
        writer.replicate(node, run_files.format_output_path(0, rank), 0, b"step 7\n")


def _run(env: Mapping[str, str], *arguments: str) -> float:
    """Run Python; return the processor time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=dict(env), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
