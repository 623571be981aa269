"""The fault matrix: what breaks under a run, and what the run makes of it.

Every row is a real fault on real nodes. Each one checks the outcome and the exit code, that the first failure is named
rightly, that nothing is left on any node that can be reached, and that the head has every byte that was written.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    written,
)
from tests.lab.head_cli import Head
from tests.lab.spec import NodeSpec
from tests.lab.waiting import wait_for
from tests.lab.ways import not_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

HOUR = 3600.0
HIDE = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(15, b"innocent", 0, 0, 0)
        os.closerange(0, 256)
        os.execve("/bin/sleep", ["innocent", "86400"], {})
    os._exit(0)
os.wait()
while not subprocess.run(["pgrep", "-f", "^innocent 86400"], stdout=subprocess.DEVNULL).returncode == 0:
    time.sleep(0.02)
os._exit(4)
"""
HEEDLESS = "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.rename(home + '/do.' + rank, home + '/done.' + rank)"
STAND_STILL = "time.sleep(600)"
FIRST_TO_GO = """
import fcntl
path = "/srv/shared/alive." + os.environ["CLUSTERCTL_RUN_ID"]
lock = os.open(path + ".new", os.O_CREAT | os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
os.rename(path + ".new", path)
os._exit(5)
"""
# As with a socket, it is the kernel that tells: the lock goes while the process that held it is taken apart.
PEER_GONE = """
import fcntl
while not os.path.exists("/srv/shared/alive." + os.environ["CLUSTERCTL_RUN_ID"]):
    select.select([], [], [], 0.0005)
fcntl.flock(os.open("/srv/shared/alive." + os.environ["CLUSTERCTL_RUN_ID"], os.O_RDONLY), fcntl.LOCK_SH)
say(b"RuntimeError: Connection closed by peer [10.0.0.9]:1234\\n")
os._exit(1)
"""


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


# --- a worker's own end


@dataclass(frozen=True)
class Row:
    """What some of four ranks do (0 and 1 on the first node), and what has to be known of it."""

    orders: dict[int, str]
    kind: str
    rank: int
    exit_code: int | None = None
    signal: str | None = None
    job: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "exit code": Row({2: "os._exit(3)"}, "exit", 2, exit_code=3),
    "SIGKILL": Row({1: "os.kill(os.getpid(), 9)"}, "signal", 1, signal="SIGKILL"),
    "SIGSEGV": Row({3: "os.kill(os.getpid(), signal.SIGSEGV)"}, "signal", 3, signal="SIGSEGV"),
    "exit 0 early, the others stand still": Row(
        {0: STAND_STILL, 1: STAND_STILL, 2: "os._exit(0)", 3: STAND_STILL},
        "exited_early", 2, exit_code=0, job={"finish_grace": "2s"},
    ),
    "exit 0 early, the others lose their connection": Row(
        {0: PEER_GONE, 1: PEER_GONE, 2: FIRST_TO_GO.replace("_exit(5)", "_exit(0)"), 3: PEER_GONE},
        "exited_early", 2, exit_code=0,
    ),
    "SIGTERM ignored by the others": Row({0: HEEDLESS, 1: HEEDLESS, 2: "os._exit(3)", 3: HEEDLESS}, "exit", 2, exit_code=3),
    "a child that hid: setsid, double fork, title, no environment, no descriptors": Row({2: HIDE}, "exit", 2, exit_code=4),
    "peers that die of it at once": Row(
        {0: PEER_GONE, 1: PEER_GONE, 2: FIRST_TO_GO, 3: PEER_GONE}, "exit", 2, exit_code=5
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_a_worker_that_ends_badly_ends_the_run_and_is_named(nodes: NodeFactory, head: Head, row: Row) -> None:
    made = nodes(2)
    make(head, made, job=row.job)
    run = start(head)
    for rank in (0, 2):
        writes(made[rank // 2], rank)
    victims = sorted(row.orders, key=lambda rank: rank == row.rank)
    for rank in victims:
        order(made[rank // 2], rank, row.orders[rank])

    waited = head.run("wait", run)

    status = head.json("status", run)
    cause = status["cause"]
    assert waited.returncode == 100, head.run("status", run).stdout
    assert (status["state"], status["remaining"]) == ("failed", [])
    assert (cause["kind"], cause["rank"], cause["node"]) == (row.kind, row.rank, made[row.rank // 2].name)
    assert (cause["exit_code"], cause["signal"]) == (row.exit_code, row.signal)
    nothing_left(made)
    every_byte(head, run, made)


def test_ranks_that_end_well_at_different_times_are_no_fault_while_others_work(nodes: NodeFactory, head: Head) -> None:
    made = nodes(1)
    make(head, made, job={"finish_grace": "3s"})
    run = start(head)
    order(made[0], 0, "os._exit(0)")
    writes(made[0], 1, 6000)

    made[0].path("go").touch()

    assert head.run("wait", run).returncode == 0
    nothing_left(made)
    every_byte(head, run, made)


@not_over("srun", reason="a step of the lab's Slurm does not see the memory cgroups of its node")
@pytest.mark.skipif(
    not Path("/sys/fs/cgroup/memory/memory.oom_control").exists(), reason="needs memory cgroups of version 1"
)
def test_a_worker_killed_for_memory_is_named_with_the_reason(nodes: NodeFactory, head: Head) -> None:
    made = nodes([NodeSpec(cgroup=True, memory="700m"), NodeSpec()])
    make(head, made, workers=1)
    run = start(head)

    order(made[0], 0, "eater = bytearray(2 << 30)")

    assert head.run("wait", run).returncode == 100
    cause = head.json("status", run)["cause"]
    assert (cause["kind"], cause["rank"], cause["signal"]) == ("oom", 0, "SIGKILL"), cause
    nothing_left(made)


def test_a_frozen_worker_is_gone_within_grace_after_down(nodes: NodeFactory, head: Head) -> None:
    made = nodes(1)
    make(head, made)
    run = start(head)
    writes(made[0], 0)
    made[0].signal(worker_pid(made[0], 0), signal.SIGSTOP)
    began = time.monotonic()

    ended = head.run("down", run)

    assert ended.returncode == 0, ended.stderr
    assert time.monotonic() - began < 10
    assert head.run("wait", run).returncode == 103
    nothing_left(made)
    every_byte(head, run, made)


# --- what stands around the workers


def ends_well(head: Head, run: str, made: Sequence[Node]) -> None:
    """Let all ranks end; nothing may be missing."""
    for node in made:
        node.path("go").touch()
    assert head.run("wait", run).returncode == 0, head.run("status", run).stdout
    assert {w["exit_code"] for w in head.json("status", run)["workers"]} == {0}
    nothing_left(made)
    every_byte(head, run, made)


GUARDS = {
    "serve": "clusterctl-agent serve",
    "waiter": "clusterctl-agent wait",
    "supervisor": "clusterctl-agent supervise",
}


def test_serve_waiters_and_supervisors_killed_under_a_run_cost_no_run_and_no_byte(
    nodes: NodeFactory, head: Head
) -> None:
    made = nodes(2)
    make(head, made)
    run = start(head)
    for guard, node in (("serve", made[0]), ("waiter", made[0]), ("supervisor", made[1])):
        writes(node, 2 * made.index(node))
        victims = node.pids_of(GUARDS[guard])
        assert victims, f"no {guard}"
        for pid in victims:
            node.signal(pid, signal.SIGKILL)
    made[1].wait_for(lambda: set(made[1].pids_of(GUARDS["supervisor"])) - set(victims), what="a new supervisor")
    writes(made[1], 3)

    ends_well(head, run, made)


def test_an_sshd_killed_with_its_sessions_costs_no_run_and_no_byte(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    make(head, made)
    run = start(head)
    writes(made[1], 3)

    made[1].kill_sshd()
    writes(made[1], 3, 2000)
    made[1].restart_sshd()

    ends_well(head, run, made)


# --- links


def logins(node: Node) -> int:
    return node.sshd_log().count("Accepted publickey")


def cut_for(seconds: float, node: Node) -> None:
    """Cut a link until a rank has worked on for so long."""
    node.cut()
    end = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() >= end, seconds + 5, what="the time to pass", every=0.1)
    node.restore()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(5.0, id="seconds"),
        pytest.param(
            60.0, id="minute", marks=pytest.mark.skipif("CLUSTERCTL_LONG" not in os.environ, reason="`make killer`")
        ),
    ],
)
def test_a_link_cut_for_seconds_costs_no_run_and_no_byte(nodes: NodeFactory, head: Head, seconds: float) -> None:
    made = nodes(2)
    make(head, made)
    run = start(head)
    writes(made[1], 3)

    cut_for(seconds, made[1])

    ends_well(head, run, made)


def test_a_half_open_connection_is_noticed_shown_and_dialed_again_without_a_rush(
    nodes: NodeFactory, head: Head
) -> None:
    made = nodes(2)
    make(head, made)
    run = start(head)
    writes(made[1], 3)
    before = logins(made[1])
    watcher = head.start("attach", run)

    made[1].stop_sshd()
    wait_for(lambda: node_state(head, run, 1) == "unreachable", 12.0, what="the silence to be shown")
    wait_for(lambda: "no sign of life" in events_of(head, run), 20.0, what="the connection to be given up")
    made[1].cont_sshd()
    wait_for(lambda: node_state(head, run, 1) == "running", 30.0, what="the node to be there again")
    for node in made:
        node.path("go").touch()

    _, said = watcher.communicate(timeout=60)
    assert watcher.returncode == 0, said
    assert f"{made[1].name}: no answer for 7 s; given up in" in said
    assert f"{made[1].name}: connected again" in said
    assert logins(made[1]) - before <= 4
    nothing_left(made)
    every_byte(head, run, made)


def test_a_node_that_lets_us_in_and_breaks_off_is_not_logged_into_in_a_loop(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    make(head, made)
    run = start(head)
    before = logins(made[1])

    end = time.monotonic() + 5.0
    killed = 0
    while time.monotonic() < end:
        for pid in made[1].pids_of("clusterctl-agent serve"):
            made[1].signal(pid, signal.SIGKILL)
            killed += 1
        writes(made[1], 3, 30)

    assert killed >= 2
    assert logins(made[1]) - before <= 4
    ends_well(head, run, made)


def node_state(head: Head, run: str, index: int) -> str:
    return str(head.json("status", run)["nodes"][index]["state"])


def events_of(head: Head, run: str) -> str:
    return (Path(head.env["XDG_STATE_HOME"]) / "clusterctl/runs" / run / "events.jsonl").read_text()


def test_dead_and_cut_off_nodes_end_the_run_and_are_cleaned_when_they_answer_again(
    nodes: NodeFactory, head: Head
) -> None:
    made = nodes(3)
    make(head, made, workers=1, network={"node_lost_after": "8s"}, ssh={"connect_timeout": "3s"})
    run = start(head)
    for rank, node in enumerate(made):
        writes(node, rank)
    dead, cut = made[1], made[2]

    dead.kill()
    cut.cut()
    waited = head.run("wait", run)

    status = head.json("status", run)
    assert waited.returncode == 105
    assert (status["state"], status["cause"]["kind"]) == ("lost", "node_lost")
    assert {entry["node"] for entry in status["remaining"]} == {dead.name, cut.name}
    nothing_left(made[:1])
    assert worker_pid(cut, 2)
    cut.restore()
    again = head.run("down", run)
    assert again.returncode == 0, again.stderr
    assert {entry["node"] for entry in head.json("status", run)["remaining"]} == {dead.name}
    assert head.run("wait", run).returncode == 105
    nothing_left([made[0], cut])
    assert (run_file(head, run, cut, 2)) == written(cut, 2)[: len(run_file(head, run, cut, 2))]
    assert len(run_file(head, run, cut, 2)) > len(written(cut, 2)) - 100


def run_file(head: Head, run: str, node: Node, rank: int) -> bytes:
    folder = Path(head.env["XDG_STATE_HOME"]) / "clusterctl/runs" / run
    return (folder / "nodes" / node.name / "attempt-0" / f"rank-{rank}.log").read_bytes()


# --- starts and clocks


@pytest.mark.parametrize("phase", ["connect", "prepare", "start"])
def test_down_while_a_run_is_being_started_leaves_nothing(nodes: NodeFactory, head: Head, phase: str) -> None:
    made = nodes(2)
    make(head, made)
    up = head.start("up", "--no-health")
    wait_for(lambda: f'"phase","name":"{phase}"' in newest_events(head), what=f"the phase {phase}", every=0.002)

    ended = head.run("down")

    assert ended.returncode == 0, ended.stderr
    _, said = up.communicate(timeout=30)
    assert up.returncode == 103, said
    nothing_left(made)


def test_a_node_whose_agent_dies_while_it_prepares_keeps_nothing_of_the_failed_start(
    nodes: NodeFactory, head: Head
) -> None:
    made = nodes(2)
    make(head, made)
    up = head.start("up", "-d", "--no-health")
    wait_for(lambda: made[0].pids_of("clusterctl-agent supervise"), what="the supervisor", every=0.001)
    for pid in made[0].pids_of("clusterctl-agent serve"):
        made[0].signal(pid, signal.SIGKILL)

    _, said = up.communicate(timeout=60)

    if up.returncode == 0:
        # The agent had answered before it was killed: the controller dialed again, and the run goes on.
        assert head.run("down").returncode == 0, said
    nothing_left(made)


@pytest.mark.parametrize("phase", ["sync", "prepare"])
def test_down_after_the_controller_died_during_the_start_leaves_nothing(
    nodes: NodeFactory, head: Head, phase: str
) -> None:
    made = nodes(2)
    make(head, made)
    up = head.start("up", "-d", "--no-health")
    wait_for(lambda: f'"phase","name":"{phase}"' in newest_events(head), what=f"the phase {phase}", every=0.002)
    run = newest_run(head)
    os.kill(controller_pid(head, run.name), signal.SIGKILL)

    ended = head.run("down", run.name)

    up.communicate(timeout=30)
    assert ended.returncode == 0, ended.stderr
    assert head.json("status", run.name)["state"] in ("failed", "cancelled")
    assert '"kind":"ended"' in (run / "events.jsonl").read_text()
    nothing_left(made)


def newest_run(head: Head) -> Path:
    return next((Path(head.env["XDG_STATE_HOME"]) / "clusterctl/runs").iterdir())


def newest_events(head: Head) -> str:
    found = list((Path(head.env["XDG_STATE_HOME"]) / "clusterctl/runs").glob("*/events.jsonl"))
    return found[0].read_text() if found else ""


def test_clocks_an_hour_apart_change_nothing(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    made[0].skew_clock(HOUR)
    made[1].skew_clock(-HOUR)
    make(head, made)
    run = start(head)
    writes(made[1], 3)
    for rank in (0, 1, 3):
        order(made[rank // 2], rank, PEER_GONE)
    order(made[1], 2, FIRST_TO_GO)

    waited = head.run("wait", run)

    cause = head.json("status", run)["cause"]
    assert waited.returncode == 100
    assert (cause["rank"], cause["exit_code"]) == (2, 5)
    nothing_left(made)
    every_byte(head, run, made)


IN_TURN = 'for i in 1 2; do until [ -e "$HOME/go$i" ]; do sleep 0.05; done; echo "$i of $RANK"; done; sleep 600'


@not_over("srun", reason="it is sshd that shifts a node's clock here")
def test_output_of_nodes_whose_clocks_are_apart_is_merged_by_when_it_was_written(
    nodes: NodeFactory, head: Head
) -> None:
    made = nodes(2)
    made[1].skew_clock(5)
    head.write({n.name: 1 for n in made}, {"command": IN_TURN, "grace": "1s"})
    run = start(head)
    for turn in (1, 2):
        for rank, node in enumerate(made):
            index = run_dir(head, run) / "nodes" / node.name / "attempt-0" / f"rank-{rank}.idx"
            known = index.stat().st_size if index.exists() else 0
            node.path(f"go{turn}").touch()
            wait_for(lambda index=index, known=known: index.exists() and index.stat().st_size > known, 30, "its time")
    wait_for(lambda: re.search(r'"ahead":\s*(4\.9|5\.0)', events_of(head, run)), 30, "a measure of the clock")

    said = [json.loads(line) for line in head.run("logs", run, "--all-ranks", "--format", "json").stdout.splitlines()]

    assert [line["text"] for line in said] == ["1 of 0", "1 of 1", "2 of 0", "2 of 1"]
    head.run("down", run)


def test_an_end_by_hand_a_second_time_has_nothing_to_do(nodes: NodeFactory, head: Head) -> None:
    made = nodes(1)
    make(head, made)
    run = start(head)

    codes = [head.run("down", *named).returncode for named in ([run], [run], [])]

    assert codes == [0, 0, 0]
    nothing_left(made)


# --- neighbours


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
