"""Healthy runs that look like a stall from outside, all at the same time: none is ever confirmed as stalled.

`CONTROL_ROUNDS` repeats all of them (`make controls`). Limits are scaled down together: nothing is seen of a run for
several times as long as the limit.
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab import stall_jobs
from tests.lab.head_cli import Head
from tests.lab.machine import FAKETIME
from tests.lab.spec import NodeSpec
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.lab import Lab
    from tests.lab.node import Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

ROUNDS = int(os.environ.get("CONTROL_ROUNDS", "1"))
LIMIT = 8.0
# Longer than it takes from the last sign of life to a confirmed stall.
QUIET = 30.0
CUT = 20.0
CLOCK = "/run/lab/clock"
LOGS = "nodes/*/*/rank-*.log"
# The wall clock of a node under libfaketime follows a file, and so can jump while a run is under way.
JUMPING = {
    "LD_PRELOAD": FAKETIME, "FAKETIME_TIMESTAMP_FILE": CLOCK, "FAKETIME_NO_CACHE": "1", "DONT_FAKE_MONOTONIC": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Control:
    """A healthy run: its script, on how many nodes of which group, and more of the cluster file."""

    script: str = stall_jobs.CONTROLS
    on: str = "common"
    nodes: int = 2
    job: dict[str, Any] = field(default_factory=dict)
    stall: dict[str, Any] = field(default_factory=dict)


CONTROLS = {
    "slow-first-step": Control(),
    "long-validation": Control(),
    "checkpoint": Control(stall={"watch": ["*.bin"]}),
    "straggler": Control(),
    "silent-logs": Control(),
    "chatty-logs": Control(),
    "clock-jump": Control(on="jumping", nodes=1),
    "cut-off": Control(on="cut", nodes=1),
    "keras-epoch-end": Control(script=stall_jobs.KERAS_EPOCHS, nodes=1),
    "prints-now-and-then": Control(script=stall_jobs.PRINTING, job={"inject": False}),
}


@dataclass(frozen=True)
class Round:
    """What became of every control in one round: exit code, events of the head, output of rank 0 and 1."""

    codes: dict[str, int]
    events: dict[str, list[dict[str, Any]]]
    output: dict[str, str]


def start(head: Head, kind: str, control: Control, made: list[Node]) -> str:
    (head.folder / "job.py").write_text(control.script)
    head.write(
        {node.name: 1 for node in made[: control.nodes]},
        {"script": "job.py", "args": [kind, f"{QUIET:g}"], "grace": "1s", **control.job},
        name=kind,
        stall={"timeout": f"{LIMIT:g}s", "startup_timeout": f"{LIMIT:g}s", **control.stall},
    )
    started = head.run("up", "-d", "--no-health", "--json", timeout=120.0)
    assert started.returncode == 0, started.stderr
    return str(json.loads(started.stdout)["run"])


def disturb(groups: dict[str, list[Node]], runs: list[Path]) -> None:
    """While the runs are under way: cut a controller off, and let a wall clock jump by an hour and back."""
    for run in runs:
        wait_for(lambda: "begins" in "".join(p.read_text() for p in run.glob(LOGS)), 60.0, f"{run.name} to begin")  # noqa: B023
    groups["cut"][0].cut()
    for moment in ("+3600", "-3600"):
        new = groups["jumping"][0].path(CLOCK + ".new")
        new.write_text(f"{moment}\n")
        new.rename(groups["jumping"][0].path(CLOCK))
        threading.Event().wait(CUT / 2)
    groups["cut"][0].restore()


def play(base: Path, env: dict[str, str], groups: dict[str, list[Node]]) -> Round:
    heads = {kind: Head(base / kind, env) for kind in CONTROLS}
    store = Path(env["XDG_STATE_HOME"]) / "clusterctl" / "runs"
    for head in heads.values():
        head.folder.mkdir(parents=True)
    with ThreadPoolExecutor(4) as pool:
        # Those that are disturbed begin first.
        order = sorted(CONTROLS, key=lambda kind: CONTROLS[kind].on == "common")
        begun = {k: pool.submit(start, heads[k], k, CONTROLS[k], groups[CONTROLS[k].on]) for k in order}
        disturb(groups, [store / begun[kind].result() for kind in ("cut-off", "clock-jump")])
    runs = {kind: future.result() for kind, future in begun.items()}
    codes = {kind: heads[kind].run("wait", run, timeout=150.0).returncode for kind, run in runs.items()}
    folders = {kind: store / run for kind, run in runs.items()}
    lines = {kind: (folder / "events.jsonl").read_text().splitlines() for kind, folder in folders.items()}
    output = {k: "".join(p.read_text() for p in sorted(f.glob(LOGS))) for k, f in folders.items()}
    return Round(codes, {kind: [json.loads(line) for line in found] for kind, found in lines.items()}, output)


@pytest.fixture(scope="module")
def groups(lab: Lab) -> Iterator[dict[str, list[Node]]]:
    made = lab.add([NodeSpec(), NodeSpec(), NodeSpec(), NodeSpec(env=JUMPING, files={CLOCK: "+0\n"})])
    yield {"common": made[:2], "cut": made[2:3], "jumping": made[3:]}
    lab.remove(made)
    lab.end_head_processes()


@pytest.fixture(scope="module", params=range(ROUNDS), ids=lambda number: f"round-{number + 1}")
def played(
    lab: Lab, groups: dict[str, list[Node]], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Round:
    base = tmp_path_factory.mktemp("controls")
    groups["jumping"][0].path(CLOCK).write_text("+0\n")
    result = play(base / f"round-{request.param}", lab.head_env(XDG_STATE_HOME=str(base / "state")), groups)
    everywhere = [node for nodes in groups.values() for node in nodes]
    wait_for(lambda: not any(n.leftovers() for n in everywhere), what="every node to be clean")
    return result


@pytest.mark.parametrize("kind", CONTROLS)
def test_a_healthy_run_is_never_confirmed_as_stalled_and_ends_well(played: Round, kind: str) -> None:
    stalls = [(e["phase"], e["reason"], round(e["since_s"])) for e in played.events[kind] if e["kind"] == "stall"]
    assert "confirmed" not in {phase for phase, _, _ in stalls}, stalls
    assert played.codes[kind] == 0, played.output[kind][-2000:]


def test_the_straggler_is_shown(played: Round) -> None:
    notes = [event["text"] for event in played.events["straggler"] if event["kind"] == "note"]
    assert any(note.startswith("straggler: rank 1 on ") for note in notes)


def test_the_disturbances_were_there(played: Round) -> None:
    assert "unreachable" in {event.get("link") for event in played.events["cut-off"]}
    elapsed = float(played.output["clock-jump"].split("elapsed by the wall clock:")[1].split()[0])
    assert abs(elapsed - QUIET) > 1000
