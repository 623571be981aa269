"""Controllers die, are replaced and meet again: the run goes on, and never do two of them act."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.faulty import (
    controller_pid,
    every_byte,
    make,
    nothing_left,
    order,
    run_dir,
    start,
    worker_pid,
    writes,
)
from tests.lab.head_cli import Head
from tests.lab.locks import lock_holder
from tests.lab.spec import SHARED
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab

BEATS = f"""\
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = "{SHARED}/" + os.environ["CLUSTERCTL_RUN_ID"]
os.makedirs(folder, exist_ok=True)
beats = os.open("%s/%s.%s" % (folder, os.environ["CLUSTERCTL_ATTEMPT"], os.environ["RANK"]), os.O_WRONLY | os.O_CREAT)
while not os.path.exists(folder + "/go"):
    os.write(beats, b"%.6f\\n" % time.monotonic())
    time.sleep(0.01)
"""
FENCE = 2.0
ROLES = ("worker", "worker", "spare")


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


def lose_controller(head: Head, run: str) -> None:
    os.kill(controller_pid(head, run), signal.SIGKILL)
    wait_for(lambda: lock_holder(run_dir(head, run) / "lock") is None, what="the controller to be gone")


def test_a_run_is_adopted_after_its_controller_was_killed_and_its_code_arrives(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    make(head, made)
    run = start(head)
    writes(made[0], 1)
    lose_controller(head, run)
    assert [(entry["run"], entry["attended"]) for entry in head.json("ps")] == [(run, False)]
    assert head.run("wait", run).returncode == 101
    writes(made[1], 2)

    order(made[1], 2, "say(b'too late\\n'); os._exit(7)")
    attached = head.run("attach", "--adopt", run)

    assert attached.returncode == 100, attached.stderr
    assert f"rank 2 on {made[1].name}, exit code 7: too late" in attached.stderr
    nothing_left(made)
    every_byte(head, run, made)


def test_down_works_with_controller_supervisors_and_waiters_dead(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    make(head, made)
    run = start(head)
    writes(made[1], 3)
    lose_controller(head, run)
    for node in made:
        for pid in node.pids_of("clusterctl-agent"):
            node.signal(pid, signal.SIGKILL)
    assert all(worker_pid(made[rank // 2], rank) for rank in range(4))

    ended = head.run("down")

    assert ended.returncode == 0, ended.stderr
    assert head.json("status", run)["state"] == "cancelled"
    nothing_left(made)
    every_byte(head, run, made)


def test_a_controller_that_was_replaced_from_elsewhere_acts_no_more(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    make(head, made, restart={"max_restarts": 2, "backoff": 0})
    run = start(head)
    writes(made[1], 3)
    old = controller_pid(head, run)
    os.kill(old, signal.SIGSTOP)
    # Another head that shares the state of the first, or has a copy of it: no lock keeps the two apart.
    other = Head(head.folder, {**head.env, "XDG_STATE_HOME": head.env["XDG_STATE_HOME"] + ".elsewhere"})
    shutil.copytree(head.env["XDG_STATE_HOME"], other.env["XDG_STATE_HOME"])
    attached = other.start("attach", "--adopt", run)
    wait_for(lambda: lock_holder(run_dir(other, run) / "lock"), what="the second controller")
    order(made[1], 2, "os.rename(home + '/do.' + rank, home + '/done'); os._exit(3)")
    writes(made[1], 2, attempt=1)
    first = [worker_pid(made[rank // 2], rank) for rank in range(4)]

    # It has news of a failed worker to act on, and its own connections still stand.
    os.kill(old, signal.SIGCONT)
    wait_for(lambda: lock_holder(run_dir(head, run) / "lock") is None, what="the first controller to end")

    writes(made[1], 3, 1000, attempt=1)
    assert [worker_pid(made[rank // 2], rank) for rank in range(4)] == first
    assert "another controller has adopted the run" in (run_dir(head, run) / "events.jsonl").read_text()
    assert not head.json("status", run)["attended"]
    for node in made:
        node.path("go").touch()
    _, said = attached.communicate(timeout=60)
    assert attached.returncode == 0, said
    assert other.json("status", run)["attempt"] == 1
    nothing_left(made)
    every_byte(other, run, made, attempt=1)


def test_the_next_attempt_begins_only_when_the_fence_of_the_cut_off_node_has_expired(
    nodes: NodeFactory, head: Head, lab: Lab
) -> None:
    made = nodes(3)
    (head.folder / "beats.py").write_text(BEATS)
    hosts = [{"host": n.name, "gpus": 0, "workers": 1, "role": role} for n, role in zip(made, ROLES, strict=True)]
    document = {
        "version": 1,
        "name": "lab",
        "hosts": hosts,
        "job": {"script": "beats.py", "grace": "1s"},
        "on_controller_loss": {"stop_after": f"{FENCE:g}s"},
        "restart": {"max_restarts": 1, "backoff": 0},
        "network": {"node_lost_after": "7s"},
        "ssh": {"connect_timeout": "3s"},
    }
    (head.folder / "cluster.yaml").write_text(json.dumps(document))
    run = start(head)
    folder = lab.shared / run
    wait_for(lambda: beats(folder, 0, 0) and beats(folder, 0, 1), what="the first attempt")

    made[1].cut()
    wait_for(lambda: beats(folder, 1, 0) and beats(folder, 1, 1), 60.0, what="the second attempt")

    assert not made[1].pids_of("beats.py$")
    ends = [beats(folder, 0, rank)[-1] for rank in (0, 1)]
    begins = [beats(folder, 1, rank)[0] for rank in (0, 1)]
    assert max(ends) < min(begins)
    (folder / "go").touch()
    assert head.run("wait", run).returncode == 0, head.run("status", run).stdout
    made[1].restore()
    nothing_left([made[0], made[2]])
    wait_for(lambda: not made[1].pids_of("beats.py|clusterctl-agent wait"), what="the cut off node to be clean")


def beats(folder: Path, attempt: int, rank: int) -> list[float]:
    path = folder / f"{attempt}.{rank}"
    text = path.read_text() if path.exists() else ""
    return [float(line) for line in text.rpartition("\n")[0].split()]
