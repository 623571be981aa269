"""A deep check of local nodes, with real torch and gloo."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from clusterctl import api
from clusterctl.health.findings import Finding, Status
from clusterctl.run.record.health_history import DeepResults, save_deep_results
from tests.documented import typed
from tests.json_shapes import HEALTH, check

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead

pytestmark = pytest.mark.torch

WRONG_BITS = """\
import sys
if sys.orig_argv[-1:] == ["measure"]:
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

    check(HEALTH, json.loads(done.stdout))
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
    results = DeepResults(time.time() - age_s, ("local",), (), (bad,))
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
