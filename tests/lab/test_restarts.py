"""A new attempt after a failure: the same code, the same count everywhere, the newest checkpoint, a spare for a lost node."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.faulty import add_spare, controller_pid
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory

SHOW = """\
import json, os, pathlib, sys, time
env, home = os.environ, pathlib.Path.home()
names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "CLUSTERCTL_ATTEMPT", "CLUSTERCTL_RESUME_FROM")
print(json.dumps({"code": "as it was", **{n: env.get(n) for n in names}}), flush=True)
attempt = int(env["CLUSTERCTL_ATTEMPT"])
"""
FAILS_ONCE = (
    SHOW
    + """\
pathlib.Path("ckpt").mkdir(exist_ok=True)
if attempt == 0:
    for name in ("step-1", "step-2", "step-3.tmp", f"step-4-of-{env['RANK']}"):
        pathlib.Path("ckpt", name).write_text("weights")
    pathlib.Path("ckpt/step-5").mkdir(exist_ok=True)
    pathlib.Path("ckpt/step-5/__0_0.distcp").write_text("a shard without its .metadata")
    (home / f"ready-{env['LOCAL_RANK']}").touch()
    while not (home / "go").exists():
        time.sleep(0.02)
    sys.exit(3)
"""
)
MOVES_ON = (
    SHOW + 'pathlib.Path(f"step-{attempt}").write_text("x") if attempt < 3 else None\nraise ValueError(time.time())\n'
)
FAILS_ALIKE = SHOW + "raise ValueError(time.time())\n"
WAITS_FIRST = (
    SHOW + "while attempt == 0 or not (home / 'go').exists():\n    (home / 'ready').touch()\n    time.sleep(0.05)\n"
)


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


def start(head: Head) -> str:
    return str(head.json("up", "-d", "--no-health")["run"])


def said(head: Head, run: str, *arguments: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in head.run("logs", run, "--format", "json", *arguments).stdout.splitlines()]
    return [{"node": line["node"], **json.loads(line["text"])} for line in lines if line["text"].startswith("{")]


def test_every_rank_begins_again_with_the_code_of_the_start_and_the_newest_whole_checkpoint(
    nodes: NodeFactory, head: Head
) -> None:
    made = nodes(2)
    (head.folder / "train.py").write_text(FAILS_ONCE)
    job = {"script": "train.py", "grace": "1s", "checkpoint": {"pattern": "ckpt/step-*"}}
    head.write({n.name: 2 for n in made}, job, restart={"max_restarts": 2, "backoff": 0})
    run = start(head)
    for node in made:
        both = [node.path(f"ready-{rank}") for rank in range(2)]
        node.wait_for(lambda both=both: all(path.exists() for path in both), what="its checkpoints")

    (head.folder / "train.py").write_text("print('edited on the head')")
    made[1].path(f"{head.workdir()}/train.py").write_text("print('edited on a node')")
    made[0].path("go").touch()
    ended = head.run("wait", run)

    assert ended.returncode == 0, head.run("status", run).stdout
    old, new = said(head, run, "--attempt", "0"), said(head, run, "--attempt", "1")
    assert {e["code"] for e in (*old, *new)} == {"as it was"}
    assert [sorted(e["RANK"] for e in entries) for entries in (old, new)] == [["0", "1", "2", "3"]] * 2
    assert {(e["TORCHELASTIC_RESTART_COUNT"], e["CLUSTERCTL_ATTEMPT"]) for e in new} == {("1", "1")}
    assert {e["CLUSTERCTL_RESUME_FROM"] for e in old} == {None}
    assert {e["CLUSTERCTL_RESUME_FROM"] for e in new} == {"ckpt/step-2"}
    ports = [{e["MASTER_PORT"] for e in entries} for entries in (old, new)]
    assert [len(found) for found in ports] == [1, 1]
    assert ports[0] != ports[1]
    assert [e["CLUSTERCTL_ATTEMPT"] for e in said(head, run)] == ["0"] * 4 + ["1"] * 4


@pytest.mark.parametrize(
    ("script", "attempts", "why"),
    [
        pytest.param(FAILS_ALIKE, 3, "3 attempts failed alike, without a newer checkpoint between", id="no progress"),
        pytest.param(MOVES_ON, 5, "all 4 restarts are used up", id="progress at first"),
    ],
)
def test_attempts_that_fail_alike_without_progress_are_not_repeated_for_ever(
    nodes: NodeFactory, head: Head, script: str, attempts: int, why: str
) -> None:
    (made,) = nodes(1)
    (head.folder / "train.py").write_text(script)
    job = {"script": "train.py", "checkpoint": {"pattern": "step-*"}}
    head.write({made.name: 2}, job, restart={"max_restarts": 4, "backoff": 0})

    done = head.run("up", "--no-health")

    assert done.returncode == 100
    assert f"no restart: {why}" in done.stderr
    assert head.json("status")["attempt"] == attempts - 1


def test_a_controller_that_dies_before_the_next_attempt_is_followed_by_one_that_begins_it(
    nodes: NodeFactory, head: Head
) -> None:
    (made,) = nodes(1)
    (head.folder / "train.py").write_text(SHOW + "sys.exit(3 * (1 - attempt))\n")
    head.write({made.name: 2}, {"script": "train.py"}, restart={"max_restarts": 1, "backoff": "3s"})
    run = start(head)
    wait_for(lambda: head.json("status", run)["state"] == "restarting", what="the pause before the next attempt")

    os.kill(controller_pid(head, run), signal.SIGKILL)
    attached = head.run("attach", "--adopt", run)

    assert attached.returncode == 0, attached.stderr
    # Where one rank is quick to fail, the other may be stopped before it says anything.
    assert [e["CLUSTERCTL_ATTEMPT"] for e in said(head, run)][-2:] == ["1", "1"]
    assert head.json("status", run)["attempt"] == 1


def test_a_spare_takes_the_place_of_a_node_that_died_once_its_fence_has_expired(nodes: NodeFactory, head: Head) -> None:
    first, second, spare = nodes(3)
    (head.folder / "train.py").write_text(WAITS_FIRST)
    path = head.write(
        {first.name: 1, second.name: 1},
        {"script": "train.py", "grace": "1s"},
        restart={"max_restarts": 1, "backoff": 0},
        network={"node_lost_after": "8s"},
        on_controller_loss={"stop_after": "3s"},
    )
    add_spare(path, spare)
    run = start(head)
    second.wait_for(lambda: second.path("ready").exists(), what="its worker")

    (head.folder / "train.py").write_text("print('edited')")
    second.kill()
    spare.wait_for(lambda: spare.pids_of("train.py"), deadline=40, what="its worker")
    for node in (first, spare):
        node.path("go").touch()
    attached = head.run("attach", run, "--all-ranks")

    assert attached.returncode == 0, attached.stderr
    again = said(head, run, "--attempt", "1")
    assert {(e["node"], e["RANK"], e["code"]) for e in again} == {
        (first.name, "0", "as it was"),
        (spare.name, "1", "as it was"),
    }
    assert f"for {second.name}'s workers to time out (on_controller_loss.stop_after)" in attached.stderr
    assert f"{spare.name} takes the place of {second.name}, which is lost" in attached.stderr
    status = head.json("status", run)
    assert [(n["node"], n["node_rank"]) for n in status["nodes"]] == [(first.name, 0), (spare.name, 1)]
    assert status["remaining"] == []
