"""A deep check of local nodes, with real torch and gloo."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import pytest
import yaml

from clusterctl import api
from clusterctl.health.deep.measurements import Measure, Measurement
from clusterctl.health.findings import Finding, Status
from clusterctl.run.record.health_history import DeepResults, save_deep_results
from tests.documented import typed
from tests.json_shapes import HEALTH, check
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

pytestmark = pytest.mark.torch

WRONG_BITS = """\
import sys
if any(word.endswith(".rank_steps") for word in sys.orig_argv):
    import torch
    right = torch.mm
    def multiply(a, b, *, out):
        right(a, b, out=out)
        out[7, 11] += 1
    torch.mm = multiply
"""


@pytest.mark.timeout(600)
def test_two_nodes_are_measured_and_one_computes_other_bits(head: LocalHead) -> None:
    bad = head.folder / "bad"
    bad.mkdir()
    (bad / "sitecustomize.py").write_text(WRONG_BITS)
    hosts = [
        {"host": "a", "transport": "local", "gpus": 0, "workers": 1},
        {"host": "b", "transport": "local", "gpus": 0, "workers": 1, "env": {"PYTHONPATH": str(bad)}},
    ]
    document = {"version": 1, "name": "lab", "hosts": hosts, "env": {"OMP_NUM_THREADS": "1"}}
    (head.folder / "cluster.yaml").write_text(yaml.safe_dump(document))
    done = head.run(*typed("clusterctl health --deep"), "--json", timeout=500)

    report = json.loads(done.stdout)
    check(HEALTH, report)
    bits = [finding for finding in report["cluster"] if finding["check"] == "deep.bits"]
    assert {finding["status"] for finding in bits} == {"WARN"}
    assert "nodes disagree on GEMM has bits float32" in bits[0]["message"]
    (stored,) = (head.folder.parent / "state" / "clusterctl" / "health").glob("*/deep.json")
    results = json.loads(stored.read_text())
    found = {(entry["measure"], entry["node"]): entry for entry in results["measurements"]}
    assert found["context_errors", "a"]["value"] == found["context_errors", "b"]["value"] == 0
    assert found["gemm_digest", "a"]["digest"] != found["gemm_digest", "b"]["digest"]
    assert found["gemm_errors", "b"]["value"] == 0
    assert found["pair_all_reduce", "a"]["value"] > 0
    assert "deep check: round 2 of 2" in done.stderr
    assert head.json("ps", "-a") == []


def store_finding(head: LocalHead, *, age_s: float) -> None:
    """Store a deep check of the cluster file of `head` that found a bad node."""
    bad = Finding(check="deep.bits", status=Status.FAIL, message="computes other bits than the others", node="local")
    clocks = [Measurement(node="local", gpu=gpu, measure=Measure.CLOCK, value=1900.0 - gpu) for gpu in range(2)]
    results = DeepResults(time.time() - age_s, ("local",), tuple(clocks), (bad,))
    state = Path(head.env["XDG_STATE_HOME"]) / "clusterctl"
    state.mkdir(parents=True)
    save_deep_results(state, api.load(head.folder / "cluster.yaml"), results)


def test_a_bad_node_of_last_night_keeps_a_run_from_its_start(head: LocalHead) -> None:
    hosts = [{"host": "local", "transport": "local", "gpus": 0, "workers": 1}]
    document = {"version": 1, "hosts": hosts, "health": {"deep": "nightly"}, "job": {"command": "true"}}
    (head.folder / "cluster.yaml").write_text(yaml.safe_dump(document))
    store_finding(head, age_s=3600)
    done = head.run("up")
    assert done.returncode == 5
    assert "computes other bits than the others" in done.stderr
    assert "`clusterctl health --deep` measures again" in done.stderr
    assert head.json("ps", "-a") == []
    assert head.run("up", "--no-health").returncode == 0
    assert "<title>local GPU 1: 1899</title>" in head.run("report", "-o", "-").stdout


def list_processes(mark: str) -> dict[int, str]:
    """The processes of this machine with `mark` in their command line or environment, each with its command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, env = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in command + env and command and int(folder.name) != os.getpid():
            found[int(folder.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


@pytest.mark.skipif("CLUSTERCTL_LONG" not in os.environ, reason="`make deep` runs it")
@pytest.mark.timeout(24 * 3600)
def test_nothing_remains_of_a_deep_check_after_a_kill_of_any_process(make_head: MakeHead) -> None:
    dice = random.Random(os.environ.get("KILLER_SEED", "1"))
    for number in range(int(os.environ.get("DEEP_KILLS", "100"))):
        head = make_head()
        hosts = [{"host": host, "transport": "local", "gpus": 0, "workers": 1} for host in ("a", "b")]
        (head.folder / "cluster.yaml").write_text(yaml.safe_dump({"version": 1, "name": "lab", "hosts": hosts}))
        state = head.env["XDG_STATE_HOME"]
        checking = Head.start(head, "health", "--deep", "--json")
        # The state folder of the head marks what runs on the head, and its runs what runs on the nodes.
        wait_for(lambda state=state: list(Path(state).glob("clusterctl/runs/*")), 120, "the run")
        (run,) = (path.name for path in Path(state).glob("clusterctl/runs/*"))
        Event().wait(dice.uniform(0, 40))
        victims = {**list_processes(state), **list_processes(run)}
        victim = dice.choice(sorted(victims) or [checking.pid])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        print(f"round {number}: {victims.get(victim, 'the check')[:120]}", flush=True)
        checking.communicate(timeout=600)
        # What the command does not end because it was killed itself, ends with the run, or with the fence.
        wait_for(
            lambda run=run, state=state: not list_processes(run) and not list_processes(state), 900, f"the end of {run}"
        )
