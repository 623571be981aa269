"""`stats` and `top` as a person sees them: from the files of a run, and from nodes that are asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.protocol import run_files
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import create_run_dir
from clusterctl.run.rules import controller_events
from tests import fake_nvml
from tests.e2e.terminal import CTRL_C, Terminal
from tests.json_shapes import STATS, check

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1024**3


def gpu(index: int, util: int) -> dict[str, Any]:
    return {"gpu": index, "util": util, "mem_used": 70 * GIB, "mem_total": 80 * GIB, "temp_c": 61, "power_w": 640.0}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run on two nodes with two GPUs each, whose controller has gone."""
    made = create_run_dir("demo", tmp_path / "state" / "clusterctl" / "runs")
    nodes = [{"node": f"gpu0{i}", "node_rank": i, "address": None, "ranks": [2 * i, 2 * i + 1]} for i in range(2)]
    writer = RunDirWriter(made)
    now = time.time()
    writer.append(controller_events.RunCreated(run=made.run, name="demo", path="/nowhere"), now)
    writer.append(
        controller_events.AttemptStarted(attempt=0, world_size=4, master_addr=None, master_port=None, nodes=nodes), now
    )
    for i in range(2):
        sample = {"t": now, "cpu": 10.0, "mem": 5.0, "status": "ok", "gpus": [gpu(0, 90 + i), gpu(1, 3)]}
        line = json.dumps({**sample, "t": now, "m": 1.0, "attempt": 0, "kind": "health"}, separators=(",", ":"))
        writer.replicate(f"gpu0{i}", run_files.SAMPLES_FILE, 0, line.encode() + b"\n")
    writer.close()
    return made.run


@pytest.mark.parametrize("leave", ["q", CTRL_C], ids=["q", "Ctrl-C"])
def test_top_sorts_by_a_key_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, env: dict[str, str], run: str, leave: str
) -> None:
    with Terminal("top", run, folder=tmp_path, env=env, columns=80, rows=24) as top:
        before = top.modes
        top.expect("q leave  f fold  sort: [node]")
        top.expect("gpu00")
        assert top.modes != before
        top.press("u")
        top.expect("[util]")
        top.press(leave)
        assert top.wait() == 0
        assert top.modes == before
        assert "Traceback" not in top.shown
    picture = top.shown.rpartition("sort: ")[0]
    assert picture.rindex("91%") < picture.rindex("90%") < picture.rindex("3%")


def stats(folder: Path, env: dict[str, str], *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    argv = [sys.executable, "-m", "clusterctl", "stats", "--json", *arguments]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    check(STATS, told)
    return done.returncode, told, done.stderr


def test_stats_of_a_run_come_from_its_files(tmp_path: Path, env: dict[str, str], run: str) -> None:
    code, told, said = stats(tmp_path, env, run)
    assert [(n["node"], n["status"], len(n["gpus"])) for n in told] == [("gpu00", "ok", 2), ("gpu01", "ok", 2)]
    assert (code, told[1]["gpus"][0]) == (0, gpu(0, 91))
    assert f"clusterctl attach --adopt {run}" in said


def test_without_a_run_the_nodes_are_asked_and_a_sick_one_keeps_nobody_waiting(
    tmp_path: Path, env: dict[str, str]
) -> None:
    hosts = "[{host: here, transport: local}, {host: there, address: 127.0.0.1, port: 1}]"
    (tmp_path / "cluster.yaml").write_text(f"version: 1\nhosts: {hosts}\njob: {{command: [sleep, '1']}}\n")
    scene = fake_nvml.Scenario(tmp_path / "scene.json", 2)
    env |= scene.environment()
    _, (well,), _ = stats(tmp_path, env, "--nodes", "here")
    scene.gpu(1, hang=["*"])
    code, (sick, lost), _ = stats(tmp_path, env)
    assert (well["status"], [g["power_w"] for g in well["gpus"]]) == ("ok", [70.0, 70.0])
    assert (sick["status"], sick["gpus"], sick["cpu"] is None) == ("stuck", [], False)
    assert sick["reason"].startswith("the GPU driver: no answer within ")
    assert (code, lost["node"], lost["status"], lost["time"]) == (4, "there", "unknown", None)
    assert lost["reason"]
