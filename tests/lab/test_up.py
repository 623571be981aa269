"""The whole path over real SSH: from a cluster file to ranks on nodes, their output, and an exit code."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.faulty import controller_pid
from tests.lab.head_cli import Head
from tests.lab.spec import NodeSpec
from tests.lab.waiting import wait_for
from tests.lab.ways import not_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

SHOW = """\
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NODE_RANK", "WEIRD")
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), **{n: os.environ.get(n) for n in names}}), flush=True)
"""
FOREVER = {"command": ["sleep", "600"], "grace": "2s"}


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


def said(head: Head, run: str) -> list[dict[str, object]]:
    lines = head.run("logs", run, "--all-ranks", "--format", "json").stdout.splitlines()
    return [json.loads(json.loads(line)["text"]) for line in lines]


def newest(head: Head) -> str:
    return head.newest()


def nothing_left(made: Sequence[Node]) -> None:
    """Agents and supervisors take their leave a moment after the run's end; workers must be gone by then."""
    wait_for(lambda: not any(n.leftovers() for n in made), what=f"{[n.leftovers() for n in made]} to be gone")


def test_eight_ranks_on_four_unlike_nodes_meet_on_the_network_that_they_share(nodes: NodeFactory, head: Head) -> None:
    made = nodes(4)
    (head.folder / "show.py").write_text(SHOW)
    head.write(dict(zip((n.name for n in made), (1, 2, 2, 3), strict=True)), {"script": "show.py"})

    done = head.run("up", "--all-ranks")

    assert done.returncode == 0, done.stderr
    found = {int(str(entry["RANK"])): entry for entry in said(head, newest(head))}
    assert sorted(found) == list(range(8))
    assert {entry["WORLD_SIZE"] for entry in found.values()} == {"8"}
    assert {entry["MASTER_ADDR"] for entry in found.values()} == {made[0].address}
    assert [found[r]["GLOO_SOCKET_IFNAME"] for r in (0, 1, 3, 5)] == [n.interface for n in made]
    assert len({n.interface for n in made}) > 1
    nothing_left(made)


def test_one_rank_fails_and_all_stop_everywhere(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    job = {"command": 'if [ "$RANK" = 2 ]; then echo boom; exit 3; fi; sleep 600', "grace": "2s"}
    head.write({n.name: 2 for n in made}, job)

    done = head.run("up", "--no-health")

    assert done.returncode == 100
    assert f"first observed failure: rank 2 on {made[1].name}, exit code 3: boom" in done.stderr
    nothing_left(made)


def test_a_node_that_cannot_be_reached_is_named_and_nothing_starts(nodes: NodeFactory, head: Head) -> None:
    made = nodes(3)
    head.write({n.name: 1 for n in made}, FOREVER, ssh={"connect_timeout": "3s"})
    made[1].cut()
    began = time.monotonic()

    done = head.run("up")

    assert done.returncode == 4, done.stderr
    assert made[1].name in done.stderr
    assert time.monotonic() - began < 20
    made[1].restore()
    nothing_left(made)


@pytest.mark.parametrize("shell", ["/bin/sh", "/usr/bin/tcsh", "/usr/bin/fish"])
def test_what_a_user_wrote_reaches_the_worker_unchanged(nodes: NodeFactory, head: Head, shell: str) -> None:
    made = nodes(1, shell=shell)
    weird = ["a'; echo foo", "$(id)", "two\nlines", "grüße", "-x", '"', "\\", "`id`", ""]
    (head.folder / "dir ' $(x)").mkdir()
    (head.folder / "dir ' $(x)" / "shöw.py").write_text(SHOW)
    job = {"script": "dir ' $(x)/shöw.py", "args": weird}
    head.write({made[0].name: 1}, job, env={"WEIRD": "".join(weird)})

    done = head.run("up", "--no-health", "--", "--", "--last")

    assert done.returncode == 0, done.stderr
    (entry,) = said(head, newest(head))
    assert entry["argv"] == [*weird, "--", "--last"]
    assert entry["WEIRD"] == "".join(weird)


def test_a_chatty_login_does_no_harm(nodes: NodeFactory, head: Head) -> None:
    made = nodes(1, noisy=True)
    head.write({made[0].name: 1}, {"command": ["echo", "hello"]})

    assert head.run("up", "--no-health").returncode == 0


@not_over("command", "srun", reason="host keys are of SSH")
def test_an_unknown_host_key_is_refused_until_it_is_trusted(nodes: NodeFactory, head: Head) -> None:
    made = nodes([NodeSpec(known=False)])
    head.write({made[0].name: 1}, {"command": ["echo", "hello"]})

    refused = head.run("up", "--no-health")
    trusted = head.run("trust", "--yes")
    done = head.run("up", "--no-health")

    assert refused.returncode == 4
    assert "clusterctl trust" in refused.stderr
    assert "SHA256:" in trusted.stdout
    assert done.returncode == 0, done.stderr


def test_a_detached_run_is_followed_waited_for_and_ended_from_elsewhere(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    head.write({n.name: 2 for n in made}, FOREVER)

    run = head.json("up", "-d", "--no-health")["run"]
    waited = head.run("wait", run, "--timeout", "1s")
    status = head.json("status", run)
    ended = head.run("down", run)

    assert waited.returncode == 124
    assert (status["state"], status["attended"]) == ("running", True)
    assert ended.returncode == 0, ended.stderr
    assert head.run("wait", run).returncode == 103
    nothing_left(made)


def test_a_run_outlives_its_controller_and_is_ended_without_it(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    head.write({n.name: 1 for n in made}, FOREVER)
    run = head.json("up", "-d", "--no-health")["run"]

    os.kill(controller_pid(head, run), signal.SIGKILL)
    wait_for(lambda: not head.json("status", run)["attended"], what="the controller to be gone")
    waited = head.run("wait", run)
    alive = [n.pids_of("sleep 600") for n in made]
    ended = head.run("down", run)

    assert waited.returncode == 101
    assert all(alive)
    assert ended.returncode == 0, ended.stderr
    assert head.json("status", run)["state"] == "cancelled"
    nothing_left(made)


def test_workers_outlive_their_supervisor_and_their_exit_codes_arrive(nodes: NodeFactory, head: Head) -> None:
    (made,) = nodes(1)
    head.write({made.name: 2}, {"command": 'while [ ! -e "$HOME/go" ]; do sleep 0.1; done; exit 0'})
    run = head.json("up", "-d", "--no-health")["run"]

    supervisor = wait_for(lambda: made.pid_of("supervise"), what="the supervisor")
    made.signal(supervisor, signal.SIGKILL)
    wait_for(lambda: (made.pid_of("supervise") or supervisor) != supervisor, what="a new supervisor")
    made.path("go").touch()
    waited = head.run("wait", run)

    assert waited.returncode == 0, head.run("status", run).stdout
    assert {w["exit_code"] for w in head.json("status", run)["workers"]} == {0}


def test_a_child_that_hid_from_its_session_is_gone_after_down(nodes: NodeFactory, head: Head) -> None:
    (made,) = nodes(1)
    (head.folder / "hide.py").write_text(
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        os.closerange(0, 256)\n"
        "        os.execve('/bin/sleep', ['hidden', '601'], {})\n"
        "    os._exit(0)\n"
        "time.sleep(600)\n"
    )
    head.write({made.name: 1}, {"script": "hide.py", "grace": "1s"})
    decoy = made.start(["sleep", "602"])
    head.json("up", "-d", "--no-health")
    wait_for(lambda: made.pids_of("hidden 601"), what="the hidden child")

    ended = head.run("down")

    assert ended.returncode == 0, ended.stderr
    assert not made.pids_of("hidden 601")
    assert made.pids_of("sleep 602")
    decoy.kill()
    decoy.wait()


@not_over("command", "srun", reason="the list of accepted commands lies where nothing may be")
def test_a_dry_run_touches_no_network(head: Head) -> None:
    head.write({"no-such-host.invalid": 2}, {"command": ["true"]})

    plan = head.json("up", "--dry-run")

    assert plan["world_size"] == 2
    assert not (Path(head.env["XDG_STATE_HOME"]) / "clusterctl").exists()


@pytest.mark.torch
@pytest.mark.timeout(240)
def test_keras_trains_under_ddp_on_four_unlike_nodes_over_real_ssh_on_synced_code(
    nodes: NodeFactory, head: Head
) -> None:
    made = nodes(4)
    source = Path(__file__).parents[2] / "templates" / "keras_ddp" / "train.py"
    (head.folder / "train.py").write_bytes(source.read_bytes())
    workers = dict(zip((n.name for n in made), (1, 2, 2, 3), strict=True))
    head.write(workers, {"script": "train.py"}, env={"OMP_NUM_THREADS": "1"})

    done = head.run("up", timeout=200)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights identical on all 8 ranks" in done.stdout
    assert float(done.stdout.split("test accuracy ")[1].split()[0]) >= 0.95
