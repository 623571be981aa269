"""What `down` cannot end it names, and says so with its exit code."""

from __future__ import annotations

import shutil
import signal
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import json_shapes as shapes
from tests.lab import hung_mount
from tests.lab.faulty import add_spare, worker_pid
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for
from tests.lab.ways import not_over

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab
    from tests.lab.node import Node

# A worker that becomes root: the user's supervisor may not send it a signal.
PROGRAM = "$( = $) = 0; $< = $> = 0; $| = 1; print qq(beyond reach\\n); sleep 600"


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


@not_over("srun", reason="the steps of the lab's Slurm are root's")
def test_a_process_beyond_reach_is_named_and_the_code_is_7(lab: Lab, nodes: NodeFactory, head: Head) -> None:
    (made,) = nodes(1, user="me")
    rooted = lab.shared / "rooted"
    shutil.copy("/usr/bin/perl", rooted)
    rooted.chmod(0o4755)
    head.write({made.name: 1}, {"command": ["/srv/shared/rooted", "-e", PROGRAM], "grace": "1s"})
    run = str(head.json("up", "-d", "--no-health")["run"])
    pid = made.wait_for(lambda: made.pid_of("rooted"), what="the worker")
    made.wait_for(lambda: "beyond reach" in head.run("logs", run).stdout, what="the worker to be root")

    ended = head.run("down", run)
    told = head.json("down", run)
    status = head.json("status", run)

    assert ended.returncode == 7, ended.stderr
    assert "rooted" in ended.stderr
    assert head.run("wait", run).returncode == 7
    shapes.check(shapes.filled(shapes.DOWN), told)
    shapes.check(shapes.STATUS, status)
    assert [(r["node"], r["pid"]) for r in told[0]["remaining"]] == [(made.name, pid)]
    assert status["remaining"] == told[0]["remaining"]
    assert (status["state"], status["exit_code"]) == ("cancelled", 103)


STUCK = """
import os, pathlib, sys, threading
home, rank, attempt = pathlib.Path.home(), os.environ["RANK"], os.environ["CLUSTERCTL_ATTEMPT"]
print("hello from", rank, attempt, flush=True)
if attempt == "0" and rank == "0":
    os.stat("/mnt/x")
if attempt == "0":
    while not (home / "fail").exists():
        threading.Event().wait(0.02)
    sys.exit(3)
"""


@not_over("srun", reason="a step of the lab's Slurm does not see what its node mounts later")
def test_a_node_with_a_process_that_nothing_can_end_is_named_and_a_spare_takes_its_place(
    nodes: NodeFactory, head: Head
) -> None:
    sick, well, spare = nodes(3)
    (head.folder / "stuck.py").write_text(STUCK)
    path = head.write(
        {sick.name: 1, well.name: 1},
        {"script": "stuck.py", "grace": "1s"},
        restart={"max_restarts": 1, "backoff": 0},
    )
    add_spare(path, spare)
    with hung_mount.on(sick):
        run = str(head.json("up", "-d", "--no-health")["run"])
        sick.wait_for(lambda: hung_mount.asked(sick), what="a rank that waits in the kernel")
        pid = sick.pid_of("stuck.py$")
        well.path("fail").touch()

        attached = head.run("attach", run, "--all-ranks")
        status = head.json("status", run)
        again = head.run("down", run)
        on_nodes = head.run("down", "--orphans")
        table = head.run("ps")

        assert attached.returncode == 7, attached.stderr
        assert f"{spare.name} takes the place of {sick.name}, which is dirty" in attached.stderr
        assert (status["state"], status["attempt"]) == ("succeeded", 1)
        assert [(n["node"], n["node_rank"]) for n in status["nodes"]] == [(spare.name, 0), (well.name, 1)]
        assert [(r["node"], r["pid"]) for r in status["remaining"]] == [(sick.name, pid)]
        assert "uninterruptible wait" in status["remaining"][0]["why"]
        assert again.returncode == 7, again.stderr
        assert f"{pid}" in again.stderr
        assert (on_nodes.returncode, f"pid {pid}" in on_nodes.stderr) == (7, True), on_nodes.stderr
        assert f"may still run on {sick.name}" in table.stdout
        assert f"`clusterctl down {run}`" in table.stderr
    wait_for(lambda: not sick.pids_of("stuck.py$"), what="the end of the process")

    last = head.run("down")

    assert last.returncode == 0, last.stderr
    assert head.json("status", run)["remaining"] == []
    assert head.json("ps") == []
    assert not any(node.leftovers() for node in (sick, well, spare))


SLOW_TO_GO = textwrap.dedent("""
    import os, pathlib, threading
    home = pathlib.Path.home()
    if os.environ["RANK"] == "0":
        threading.Thread(target=os.stat, args=("/mnt/x",), daemon=True).start()
        while not (home / "go").exists():
            threading.Event().wait(0.02)
        (home / "going").touch()
        os._exit(5)
    while not (home / "going").exists():
        threading.Event().wait(0.02)
    print("RuntimeError: Connection closed by peer [10.0.0.9]:1234", flush=True)
    while not (home / "lost").exists():
        threading.Event().wait(0.02)
    os._exit(1)
""")


@not_over("srun", reason="a step of the lab's Slurm does not see what its node mounts later")
def test_a_rank_whose_end_takes_long_in_the_kernel_is_still_the_first_to_have_failed(
    nodes: NodeFactory, head: Head
) -> None:
    (made,) = nodes(1)
    (head.folder / "slow.py").write_text(SLOW_TO_GO)
    head.write({made.name: 2}, {"script": "slow.py", "grace": "5s"})
    with hung_mount.on(made):
        run = str(head.json("up", "-d", "--no-health")["run"])
        made.wait_for(lambda: hung_mount.asked(made), what="a thread that waits in the kernel")
        pid = worker_pid(made, 0, "slow.py")
        made.path("go").touch()
        # The thread that exits is a zombie until the stuck one has followed it.
        made.wait_for(lambda: state_of(made, pid) == "Z", what="the first rank to be on its way out")
        made.path("lost").touch()
        made.wait_for(lambda: '"kind":"stopping"' in journal(head, run, made), what="the stop of the others")

    assert head.run("wait", run).returncode == 100
    status = head.json("status", run)
    assert (status["cause"]["rank"], status["cause"]["exit_code"]) == (0, 5)
    assert status["remaining"] == []


def state_of(node: Node, pid: int) -> str:
    return node.path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def journal(head: Head, run: str, node: Node) -> str:
    path = Path(head.env["XDG_STATE_HOME"]) / "clusterctl/runs" / run / "nodes" / node.name / "journal.jsonl"
    return path.read_text() if path.exists() else ""


def test_what_a_node_without_its_cable_runs_on_is_said_and_ended_once_it_is_back(
    nodes: NodeFactory, head: Head
) -> None:
    here, gone = nodes(2)
    head.write({here.name: 1, gone.name: 1}, {"command": ["sleep", "600"], "grace": "1s"})
    attached = head.start("up", "--no-health")
    pid = gone.wait_for(lambda: gone.pid_of("sleep 600"), what="its worker")
    run = head.newest()

    gone.cut()
    attached.send_signal(signal.SIGINT)
    wait_for(lambda: head.json("status", run)["state"] == "stopping", what="the end to begin")
    attached.send_signal(signal.SIGINT)
    told = attached.communicate(timeout=60)[1]
    ended = head.json("status", run)
    gone.restore()
    down = head.run("down")

    assert attached.returncode == 7, told
    assert f"{gone.name}: pid {pid} (node lost)" in told
    assert down.returncode == 0, down.stderr
    assert f"{run}: cancelled; all processes" in down.stderr
    assert not gone.pids_of("sleep 600")
    after = head.json("status", run)
    assert (after["ended"], after["exit_code"], after["remaining"]) == (ended["ended"], 103, [])
    assert "nothing to end" in head.run("down").stderr
