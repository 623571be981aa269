"""`up --wait`: a run in line for GPUs that another run holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from clusterctl.agent.facts import claim_files
from tests.documented import typed
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

GPU = 760 + os.getpid() % 100
"""Of no other test that runs now."""


def write(head: LocalHead) -> LocalHead:
    path = head.write_local({"command": "sleep 600", "grace": "1s"}, sync="none")
    document = yaml.safe_load(path.read_text())
    document["hosts"][0]["gpus"] = [GPU]
    path.write_text(yaml.safe_dump(document))
    return head


def phases(head: LocalHead) -> dict[str, str]:
    return {run["run"]: run["state"] for run in head.json("ps")}


def claims(run: str) -> list[dict[str, Any]]:
    return [claim for claim in claim_files.collect_claims()["claims"] if claim["run"] == run]


def test_a_run_waits_behind_the_others_and_starts_when_it_is_its_turn(make_head: MakeHead) -> None:
    ann, ben = write(make_head()), write(make_head())
    first = ann.start()
    held = f"localhost: GPU {GPU} is held by run {first} (node localhost)"
    second = str(ben.json(*typed("clusterctl up --wait"), "-d", "--no-health")["run"])
    assert phases(ben) == {second: "waiting"}
    assert held in ben.run("status", second).stdout

    late = ann.run("up", "--wait", "1s", "--no-health")
    assert late.returncode == 6
    assert f"waited 1 s for GPUs; {held}, place 2 in line, after run {second}" in " ".join(late.stderr.split())

    words = [sys.executable, "-m", "clusterctl", "up", "--wait", "cluster.yaml", "--no-health"]
    with subprocess.Popen(words, cwd=ann.folder, env=dict(ann.env), stderr=subprocess.PIPE, text=True) as waiting:
        third = wait_for(lambda: [run for run, phase in phases(ann).items() if phase == "waiting"], 60, "a third")[0]
        assert claims(third)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 103
    wait_for(lambda: not claims(third), 30, "the place to be given back")

    ann.run("down", first)
    wait_for(lambda: phases(ben) == {second: "running"}, 60, "its turn")
    (claim,) = claims(second)
    assert claim.get("kind", "run") == "run"
    ben.run("down", second)


def test_gpus_are_reserved_for_the_runs_of_their_owner_until_they_are_given_back(make_head: MakeHead) -> None:
    ann = write(make_head())
    done = ann.run(*typed("clusterctl reserve --for 2h --note TEXT", TEXT="paper deadline"))
    try:
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("1 GPU on localhost reserved until 20")
        (seen,) = [claim for claim in claim_files.collect_claims()["claims"] if claim.get("note") == "paper deadline"]
        assert (seen["kind"], seen["name"]) == ("reservation", "local")
        assert ann.run("up", "--no-health", "--command", "true").returncode == 0
    finally:
        released = ann.run(*typed("clusterctl reserve --release"))
    assert (released.returncode, released.stdout) == (0, "1 reservation ended on localhost\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param((), "`reserve` needs either `--for DURATION` or `--release`", id="no time"),
        pytest.param(("--for", "1h", "--release"), "needs either", id="both"),
        pytest.param(("--for", "31d"), "at most 30d", id="for ever"),
        pytest.param(("--for", "1h", "--note", "x" * 201), "at most 200 characters", id="a long note"),
        pytest.param(("--for", "soon"), "`soon` is not a duration", id="no duration"),
    ],
)
def test_a_reservation_needs_an_end(make_head: MakeHead, words: tuple[str, ...], said: str) -> None:
    done = write(make_head()).run("reserve", *words)

    assert done.returncode == 2
    assert said in done.stderr


def test_hosts_without_gpus_have_nothing_to_reserve(make_head: MakeHead) -> None:
    head = make_head()
    head.write_local({"command": "true"})

    done = head.run("reserve", "--for", "1h")

    assert (done.returncode, "localhost: no GPU to reserve" in done.stderr) == (6, True)
