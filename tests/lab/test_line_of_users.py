"""Two users on the same nodes, whose runs wait for overlapping GPUs while processes of them are killed: `make killer`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.lab.faulty import lock_holder, run_dir
from tests.lab.head_cli import Head
from tests.lab.spec import NodeSpec
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

RUNS = int(os.environ.get("CLUSTERCTL_LINE_RUNS", "200"))
AT_ONCE, NODES, BEN = 5, 4, 1502
GPUS = ((0,), (1,), (0, 1))
JOB = """\
import fcntl, os, time
for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
    held = open(f"/tmp/held-{gpu}", "r+")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        open("/srv/shared/two-on-a-gpu", "a").write(f"{os.environ['CLUSTERCTL_RUN_ID']} GPU {gpu}\\n")
    globals()[f"held_{gpu}"] = held
time.sleep(float(os.environ["HOLD"]))
"""


@dataclass
class Run:
    """A run in the line, and what was done to it."""

    head: Head
    wish: tuple[Any, ...]
    process: subprocess.Popen[bytes]
    name: str
    killed: str = ""
    id: str = ""
    lost_agent: bool = False


def user_head(folder: Path, env: Mapping[str, str], nodes: Sequence[Node], uid: int | None) -> Head:
    """A head of one user: over ssh, or (for the second user, who has no login) by a command."""
    folder.mkdir()
    hosts: list[dict[str, Any]] = []
    for node in nodes:
        host: dict[str, Any] = {"host": node.name, "gpus": [0], "workers": 1}
        if uid is not None:
            account = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
            words = node.inside(["setpriv", *account, "env", "HOME=/tmp/ben", "NODE={host}", "/bin/sh"])
            host["transport"] = {"command": list(words)}
        hosts.append(host)
    job = {"command": ["python3", "-c", JOB], "grace": "2s"}
    document = {"version": 1, "name": "line", "hosts": hosts, "sync": "none", "job": job}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(document))
    return Head(folder, {**env, "XDG_STATE_HOME": str(folder / "state"), "CLUSTERCTL_NO_BELL": "1"})


def begin(heads: Sequence[Head], nodes: Sequence[Node], number: int, chance: random.Random) -> Run:
    head = chance.choice(heads)
    chosen = sorted(chance.sample(range(NODES), chance.randint(1, NODES)))
    gpus, count = chance.choice(GPUS), chance.randint(1, len(chosen))
    hosts = yaml.safe_load((head.folder / "cluster.yaml").read_text())["hosts"]
    hosts = [{**hosts[index], "gpus": list(gpus)} for index in chosen]
    sets = {"hosts": hosts, "job.nodes": count, "env.HOLD": str(round(chance.uniform(0, 2), 2))}
    options = [word for key, value in sets.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    name = f"line{number}"
    words = [sys.executable, "-m", "clusterctl", "up", "--wait", "--no-health", "--name", name, *options]
    with (head.folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=head.folder, env=dict(head.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    return Run(head, (tuple(chosen), gpus, count), process, name)


def kill(run: Run, nodes: Sequence[Node], chance: random.Random) -> None:
    """Kill the controller, an agent or the command, or end the run, at whatever moment this is."""
    run.killed = chance.choice(["controller", "controller", "agent", "command", "interrupt"])
    if run.killed == "controller":
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            holder = wait_for(lambda: lock_holder(run_dir(run.head, run.id) / "lock"), 2, "a controller")
            os.kill(holder, signal.SIGKILL)
    elif run.killed == "agent":
        node = chance.choice(nodes)
        for process in node.processes():
            if "clusterctl-agent serve" in process.command and chance.random() < 1 / 3:
                subprocess.run(node.inside(["kill", "-9", str(process.pid)]), check=False)
    elif run.killed == "command":
        run.process.kill()
    else:
        run.process.send_signal(signal.SIGINT)


def events(run: Run) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (run_dir(run.head, run.id) / "events.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []


def find_id(run: Run) -> str:
    return next((p.name for p in (run.head.folder / "state/clusterctl/runs").glob(f"{run.name}-*")), "")


def times(run: Run) -> tuple[float, float | None, float | None]:
    """When the run was created, when it had its place in the line, and when it had its GPUs."""
    told = events(run)
    queued = next((e["time"] for e in told if e["kind"] == "phase" and e["name"] == "wait"), None)
    granted = next((e["time"] for e in told if e["kind"] == "traces" or (e["kind"] == "phase" and e["ended"] and
                    e["name"] == "wait" and not e["failed"])), None)  # fmt: skip
    return (told[0]["time"] if told else time.time()), queued, granted


@pytest.mark.timeout(7200)
@pytest.mark.skipif("CLUSTERCTL_LONG" not in os.environ, reason="`make killer`")
def test_who_waits_for_its_turn_gets_it_in_order_and_never_two_on_a_gpu(
    nodes: NodeFactory, head_env: dict[str, str], tmp_path: Path, lab: Any
) -> None:
    chance = random.Random(int(os.environ.get("CLUSTERCTL_LINE_SEED", "38")))
    made = nodes([NodeSpec(user="ann")] * NODES)
    for node in made:
        node.path("/tmp/ben").mkdir()
        os.chown(node.path("/tmp/ben"), BEN, BEN)
        for gpu in (0, 1):
            node.path(f"/tmp/held-{gpu}").touch()
            node.path(f"/tmp/held-{gpu}").chmod(0o666)
    heads = [user_head(tmp_path / "ann", head_env, made, None), user_head(tmp_path / "ben", head_env, made, BEN)]
    alive: list[Run] = []
    over: list[Run] = []
    began = time.monotonic()
    for number in itertools.count():
        while len(alive) >= AT_ONCE or (alive and number >= RUNS):
            for run in alive:
                run.id = run.id or find_id(run)
                if run.id and not run.killed and chance.random() < 0.02:
                    kill(run, made, chance)
                    for other in alive if run.killed == "agent" else []:
                        other.lost_agent = True
            for run in [run for run in alive if run.process.poll() is not None]:
                alive.remove(run)
                over.append(run)
                run.id = run.id or find_id(run)
                if run.killed in ("controller", "command"):
                    run.head.run("down", run.id, "--kill", timeout=120)
            time.sleep(0.2)
            assert time.monotonic() - began < 120 + 40 * len(over) + 300, f"nobody gets on: {[r.name for r in alive]}"
        if number >= RUNS:
            break
        alive.append(begin(heads, made, number, chance))

    collisions = lab.shared / "two-on-a-gpu"
    assert not collisions.exists(), collisions.read_text()
    served = [run for run in over if not run.killed]
    # A start that loses a node ends with 4; a run that waits connects again, and has its place.
    allowed = {run.name: (0, 4) if run.lost_agent else (0,) for run in served}
    bad = [run for run in served if run.process.returncode not in allowed[run.name]]
    assert not bad, [(run.head.folder / f"{run.name}.log").read_text() for run in bad]
    moments = {run.name: times(run) for run in served}
    for early, late in itertools.permutations(served, 2):
        (_, queued, granted), (created, _, later) = moments[early.name], moments[late.name]
        if early.wish == late.wish and queued is not None and granted is not None and later is not None:
            assert not queued < created or granted < later, f"{late.name} was before {early.name}"
    for head in heads:
        head.run("down", "--all", "--kill", timeout=120)
    left = [node.leftovers() for node in made]
    wait_for(lambda: not any(node.leftovers() for node in made), 90, f"the agents to end: {left}")
    kinds = {
        kind: sum(run.killed == kind for run in over) for kind in ("", "controller", "agent", "command", "interrupt")
    }
    print(f"{len(over)} runs, {len(served)} served, killed: {kinds}, {time.monotonic() - began:.0f} s")
