"""What breaks under a run, and what the run makes of it: killed and frozen workers, cut links, dead servers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

FOREVER = {"command": ["sleep", "600"], "grace": "2s"}
COUNT = """\
import os, time
copy = open(os.path.expanduser(f"~/copy.{os.environ['RANK']}"), "wb", buffering=0)
number = 0
while not os.path.exists(os.path.expanduser("~/go")):
    line = f"rank {os.environ['RANK']} line {number} grüße\\n".encode()
    copy.write(line)
    os.write(1, line)
    number += 1
    time.sleep(0.02)
os.write(1, b"no newline at the end")
copy.write(b"no newline at the end")
"""
FIVE_SECONDS_OF_LINES = 250 * 25


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


def start(head: Head, *arguments: str) -> str:
    return str(head.json("up", "-d", "--no-health", *arguments)["run"])


def nothing_left(made: Sequence[Node]) -> None:
    """Agents and supervisors take their leave a moment after the run's end."""
    wait_for(lambda: not any(n.leftovers() for n in made), what=f"{[n.leftovers() for n in made]} to be gone")


def controller_pid(head: Head, run: str) -> int:
    lock = Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs" / run / "lock"
    inode = lock.stat().st_ino
    line = next(line for line in Path("/proc/locks").read_text().splitlines() if f":{inode} " in line)
    return int(line.split()[4])


def copy_of(node: Node, rank: int) -> Path:
    """What a rank wrote, as the rank itself has kept it."""
    return node.path(f"copy.{rank}")


def writes_on(node: Node, rank: int, much: int) -> None:
    """Return when a rank has written so many bytes more, seen on its node without ssh."""
    path = wait_for(lambda: copy_of(node, rank) if copy_of(node, rank).exists() else None, what="the first line")
    size = path.stat().st_size
    node.wait_for(lambda: path.stat().st_size >= size + much, 30.0, what=f"{much} bytes more of rank {rank}")


def raw(head: Head, run: str, rank: int) -> bytes:
    return head.run("logs", run, "-o", "raw", "--rank", str(rank)).stdout.encode()


def counting(head: Head, made: Sequence[Node]) -> str:
    (head.folder / "count.py").write_text(COUNT)
    head.write({n.name: 1 for n in made}, {"script": "count.py"})
    return start(head)


def ends_well_with_every_byte(head: Head, run: str, made: Sequence[Node]) -> None:
    for node in made:
        node.path("go").touch()
    waited = head.run("wait", run)
    assert waited.returncode == 0, head.run("status", run).stdout
    for rank, node in enumerate(made):
        assert raw(head, run, rank) == copy_of(node, rank).read_bytes()
    nothing_left(made)


def test_a_killed_worker_ends_the_run_and_its_signal_is_named(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    head.write({n.name: 1 for n in made}, FOREVER)
    run = start(head)

    made[1].signal(made[1].wait_for(lambda: made[1].pid_of("^sleep 600"), what="the worker"), signal.SIGKILL)
    attached = head.run("attach", run)

    status: dict[str, Any] = head.json("status", run)
    assert attached.returncode == 100, attached.stderr
    assert f"rank 1 on {made[1].name}" in attached.stderr
    assert "SIGKILL" in attached.stderr
    assert head.run("wait", run).returncode == 100
    assert (status["cause"]["rank"], status["cause"]["node"]) == (1, made[1].name)
    assert status["cause"]["signal"] == "SIGKILL"
    nothing_left(made)


def test_a_frozen_worker_is_gone_within_grace_after_down(nodes: NodeFactory, head: Head) -> None:
    (made,) = nodes(1)
    head.write({made.name: 2}, FOREVER)
    run = start(head)
    pids = made.wait_for(lambda: found if len(found := made.pids_of("^sleep 600")) == 2 else None, what="workers")
    made.signal(pids[0], signal.SIGSTOP)
    began = time.monotonic()

    ended = head.run("down", run)

    assert ended.returncode == 0, ended.stderr
    assert time.monotonic() - began < 10
    assert not made.pids_of("^sleep 600")
    nothing_left([made])


def test_a_link_cut_for_seconds_costs_no_run_and_no_byte(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    run = counting(head, made)
    writes_on(made[1], 1, 1000)

    made[1].cut()
    writes_on(made[1], 1, FIVE_SECONDS_OF_LINES)
    made[1].restore()

    ends_well_with_every_byte(head, run, made)


def test_an_sshd_killed_with_its_sessions_costs_no_run_and_no_byte(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    run = counting(head, made)
    writes_on(made[1], 1, 1000)

    made[1].kill_sshd()
    writes_on(made[1], 1, 2000)
    made[1].restart_sshd()

    ends_well_with_every_byte(head, run, made)


def test_a_run_that_fails_once_is_restarted_everywhere_and_ends_well(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    job = {
        "command": 'echo "count $TORCHELASTIC_RESTART_COUNT"; '
        'if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then if [ "$RANK" = 1 ]; then exit 3; fi; sleep 600; fi',
        "grace": "2s",
    }
    head.write({n.name: 2 for n in made}, job, restart={"max_restarts": 1, "backoff": 0})

    done = head.run("up", "--no-health")

    assert done.returncode == 0, done.stderr
    run = head.json("ps", "-a")[-1]["run"]
    counts = [head.run("logs", run, "-o", "raw", "--attempt", "1", "--rank", str(rank)).stdout for rank in range(4)]
    assert counts == ["count 1\n"] * 4
    assert head.json("status", run)["attempt"] == 1
    nothing_left(made)


def test_a_run_is_adopted_after_its_controller_was_killed_and_its_code_arrives(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    job = {"command": 'while [ ! -e "$HOME/go" ]; do sleep 0.1; done; echo late; exit $((RANK * 7))', "grace": "2s"}
    head.write({n.name: 1 for n in made}, job)
    run = start(head)
    os.kill(controller_pid(head, run), signal.SIGKILL)
    wait_for(lambda: not head.json("status", run)["attended"], what="the controller to be gone")

    made[1].path("go").touch()
    attached = head.run("attach", "--adopt", run)

    assert attached.returncode == 100, attached.stderr
    assert f"rank 1 on {made[1].name}, exit code 7: late" in attached.stderr
    assert raw(head, run, 1) == b"late\n"
    nothing_left(made)


def test_two_runs_on_the_same_nodes_leave_each_other_alone(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    hosts = {n.name: 1 for n in made}
    head.write(hosts, {"command": ["sleep", "601"], "grace": "2s"})
    one = start(head)
    other = Head(head.folder.parent / "other", head.env)
    other.folder.mkdir()
    other.write(hosts, {"command": 'while [ ! -e "$HOME/go" ]; do sleep 0.1; done'}, name="second")
    two = start(other)

    ended = head.run("down", one)

    assert ended.returncode == 0, ended.stderr
    assert not any(n.pids_of("^sleep 601") for n in made)
    assert head.json("status", two)["state"] == "running"
    for node in made:
        node.path("go").touch()
    assert head.run("wait", two).returncode == 0
    nothing_left(made)


def test_down_a_second_time_has_nothing_to_do(nodes: NodeFactory, head: Head) -> None:
    made = nodes(1)
    head.write({made[0].name: 1}, FOREVER)
    run = start(head)

    codes = [head.run("down", *named).returncode for named in ([run], [run], [])]

    assert codes == [0, 0, 0]
    nothing_left(made)
