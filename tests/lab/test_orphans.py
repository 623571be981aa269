"""Runs that this head knows nothing of: its state was lost, and on the nodes lives what is left of them."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.faulty import controller_pid, make, nothing_left, order, run_dir, start, writes
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory

HIDE = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 256)
        os.execve("/bin/sleep", ["innocent", "86400"], {})
    os._exit(0)
os.rename(home + "/do." + rank, home + "/done." + rank)
"""


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


def test_runs_of_a_lost_head_are_ended_and_nothing_else_is_touched(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    make(head, made)
    run = start(head)
    neighbour = Head(head.folder.parent / "neighbour", head.env)
    neighbour.folder.mkdir()
    make(neighbour, made, workers=1)
    known = start(neighbour, "--name", "neighbour")
    sleeper = made[1].start(["sleep", "86400"])
    same_script = made[1].start(
        ["python3", f"/root/{head.workdir()}/faulty.py"], env={"RANK": "9", "CLUSTERCTL_ATTEMPT": "0"}
    )
    order(made[1], 3, HIDE)
    made[1].wait_for(lambda: made[1].pids_of("^innocent 86400"), what="the hidden child")
    writes(made[0], 0)
    os.kill(controller_pid(head, run), signal.SIGKILL)
    shutil.rmtree(run_dir(head, run))
    # All that could know of the hidden child on the second node is gone: workers, waiters, supervisor.
    for pattern in (f"clusterctl-agent (supervise|wait) {made[1].mark(run)}", "faulty.py$"):
        for pid in made[1].pids_of(pattern):
            if made[1].environ(pid).get("CLUSTERCTL_RUN_ID", run) == run and made[1].environ(pid).get("RANK") != "9":
                made[1].signal(pid, signal.SIGKILL)

    ended = head.run("down", "cluster.yaml", "--orphans")
    again = head.run("down", "--orphans")

    assert ended.returncode == 0, ended.stderr
    assert f"ended {run}" in ended.stderr
    assert "these nodes have no orphaned run" in again.stderr
    wait_for(lambda: not any(n.pids_of(run) for n in made), what="the orphans' guards to leave")
    assert not made[1].pids_of("^innocent 86400")
    assert neighbour.json("status", known)["state"] == "running"
    assert made[1].pids_of("^sleep 86400")
    assert [made[1].environ(p).get("RANK") for p in made[1].pids_of(f"{head.workdir()}/faulty.py$")] == ["9"]
    for pid in made[1].pids_of(f"^sleep 86400|{head.workdir()}/faulty.py$"):
        made[1].signal(pid, signal.SIGKILL)
    for decoy in (sleeper, same_script):
        decoy.wait()
    assert neighbour.run("down", known).returncode == 0
    nothing_left(made)
