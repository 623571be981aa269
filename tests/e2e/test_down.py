"""`down` where the controller cannot be asked, dies, or has a node that will not end: it says so, and it returns."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.linux import proc
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events, outcome
from tests import fake_disk
from tests.lab.faulty import controller_pid, run_dir
from tests.lab.head_cli import Head
from tests.lab.locks import lock_holder
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from clusterctl.agent.protocol.record_types import RemainingProcess
    from tests.e2e.conftest import LocalHead

FOREVER: dict[str, Any] = {"command": "exec sleep 600", "grace": "1s"}
WITHOUT_NETWORK = ("unshare", "--net")


def unshare_works() -> bool:
    return bool(shutil.which("unshare")) and subprocess.run([*WITHOUT_NETWORK, "true"], check=False).returncode == 0


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    found = []
    for other in proc.list_pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [other] if parent(other) == pid else []
    return found


def supervisor_of(worker: int) -> int:
    return parent(parent(worker))


def worker_of(head: LocalHead, run: str, rank: int = 0) -> int:
    return int(head.json("status", run)["workers"][rank]["pid"])


@pytest.mark.skipif(not unshare_works(), reason="this user may not make network namespaces")
def test_a_controller_that_cannot_be_asked_from_here_is_named_with_its_machine(head: LocalHead) -> None:
    head.write_local(FOREVER)
    run = head.start()
    controller = controller_pid(head, run)

    done = replace(head, enter=WITHOUT_NETWORK).run("down", run)

    assert done.returncode == 6, done.stderr
    said = f"the controller of {run} cannot be reached from this machine; it runs on {socket.gethostname()} (pid {controller})"
    assert said in done.stderr
    assert head.json("status", run)["state"] == "running"


def test_a_controller_that_does_not_answer_is_named_with_what_ends_it(head: LocalHead) -> None:
    head.write_local(FOREVER)
    run = head.start()
    controller = controller_pid(head, run)
    os.kill(controller, signal.SIGSTOP)

    refused = head.run("down", run)

    assert refused.returncode == 6, refused.stderr
    assert (
        f"the controller of {run} does not answer; it runs on {socket.gethostname()} (pid {controller})"
        in refused.stderr
    )
    assert f"`kill -9 {controller}` there" in refused.stderr
    os.kill(controller, signal.SIGKILL)
    assert head.run("down", run).returncode == 0


@contextlib.contextmanager
def no_controller_lives(lock: Path, *, but: set[int]) -> Iterator[list[int]]:
    """Kill whoever holds a run directory, as soon as it does."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.is_set():
            pid = lock_holder(lock)
            if pid is not None and pid not in but:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed
    finally:
        over.set()
        killer.join()


def test_a_run_whose_controllers_all_die_is_ended_without_one_and_success_is_not_claimed_before(
    head: LocalHead,
) -> None:
    head.write_local(FOREVER, workers=(1, 1))
    run = head.start()
    workers = [worker_of(head, run, rank) for rank in (0, 1)]
    own: set[int] = set()

    with no_controller_lives(run_dir(head, run) / "lock", but=own) as killed:
        wait_for(lambda: killed, what="the first controller")
        process = Head.start(head, "down", "--json", run)
        own.add(process.pid)
        told, said = process.communicate(timeout=100)

    assert process.returncode == 0, said
    assert [(entry["state"], entry["remaining"]) for entry in json.loads(told)] == [("cancelled", [])]
    assert not any(alive(worker) for worker in workers)
    assert len(set(killed)) > 1


def test_a_supervisor_that_does_not_answer_holds_up_no_end(head: LocalHead) -> None:
    head.write_local(FOREVER, workers=(1, 1))
    run = head.start()
    workers = [worker_of(head, run, rank) for rank in (0, 1)]
    os.kill(supervisor_of(workers[1]), signal.SIGSTOP)
    began = time.monotonic()

    done = head.run("down", "--kill", "--json", run)

    assert time.monotonic() - began < 1.0 + 45.0
    assert done.returncode == 0, done.stderr
    assert [(entry["state"], entry["remaining"]) for entry in json.loads(done.stdout)] == [("cancelled", [])]
    assert not any(alive(worker) for worker in workers)


def empty(head: LocalHead, run: str, node: str, worker: int) -> None:
    """Make a node one that was started anew: nothing of it runs any more, and its disk is empty."""
    killed = [supervisor_of(worker), parent(worker), worker]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in killed), what="the end of all that writes there")
    shutil.rmtree(Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "nodes" / run / node)


@pytest.mark.parametrize("attended", [True, False], ids=["attended", "its controller is dead"])
def test_a_node_that_came_back_empty_does_not_hold_up_the_end(head: LocalHead, *, attended: bool) -> None:
    head.write_local(FOREVER, workers=(1, 1))
    run = head.start()
    workers, controller = [worker_of(head, run, rank) for rank in (0, 1)], controller_pid(head, run)
    agents = [agent for shell in children(controller) for agent in children(shell)]
    assert len(agents) == 2
    os.kill(controller, signal.SIGSTOP)
    empty(head, run, "localhost.1", workers[1])
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    os.kill(controller, signal.SIGCONT if attended else signal.SIGKILL)
    began = time.monotonic()

    done = head.run("down", "--kill", "--json", run)

    # What docs/protocol.md promises of `down --kill`: the grace of a job by default, and as much as it names.
    assert time.monotonic() - began < 10.0 + 45.0
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)
    assert (entry["state"] in ("cancelled", "lost"), entry["remaining"]) == (True, [])
    assert not alive(workers[0])


def test_a_state_folder_without_locks_is_refused_in_one_line_and_nothing_is_kept(head: LocalHead) -> None:
    head.write_local({"command": "true"})
    state = Path(head.env["XDG_STATE_HOME"])
    env = fake_disk.environment(no_locks=state / "clusterctl" / "runs")

    done = head.__class__(head.folder, {**head.env, **env}).run("up", "--no-health")

    assert done.returncode == 6, done.stderr
    assert "cannot be locked: No locks available" in done.stderr
    assert "set XDG_STATE_HOME to a folder on a local disk" in done.stderr
    assert list((state / "clusterctl" / "runs").iterdir()) == []


def test_an_interrupt_as_soon_as_there_is_a_run_ends_it(head: LocalHead) -> None:
    head.write_local(FOREVER, workers=(1, 1))
    runs = Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs"

    process = Head.start(head, "up", "--no-health")
    wait_for(lambda: runs.is_dir() and list(runs.iterdir()), what="the run's folder", every=0.001)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert process.returncode == 103, said
    assert "cancelled" in said
    (entry,) = head.json("ps", "-a")
    assert entry["state"] == "cancelled"


def test_what_decides_over_a_run_is_on_the_disk_before_anything_follows_from_it(
    head: LocalHead, tmp_path: Path
) -> None:
    head.write_local({"command": "exit 3"}, restart={"max_restarts": 1, "backoff": 0})
    log = tmp_path / "synced"
    env = fake_disk.environment(synced=log)

    done = head.__class__(head.folder, {**head.env, **env}).run("up", "--no-health")

    assert done.returncode == 100, done.stderr
    folder = run_dir(head, head.json("ps", "-a")[0]["run"])
    written = fake_disk.synced(log)
    journal = [size for path, size in written if path == folder / "events.jsonl"]
    ends, position = [], 0
    for line in (folder / "events.jsonl").read_bytes().splitlines(keepends=True):
        position += len(line)
        ends += [position] if json.loads(line)["kind"] in ("attempt", "decided", "restarting", "ended") else []
    assert len(ends) == 6
    assert journal == ends
    assert {path.name.split(".")[1] for path, _ in written if path.name.startswith(".plan-")} == {"plan-0", "plan-1"}
    assert any(path.name.startswith(".spec.json") for path, _ in written)


def test_a_run_that_is_over_needs_no_file_to_be_ended_again(head: LocalHead) -> None:
    head.write_local({"command": "true"})
    assert head.run("up", "--no-health").returncode == 0
    (spec,) = Path(head.env["XDG_STATE_HOME"]).glob("clusterctl/runs/*/spec.json")
    spec.unlink()

    done = head.run("down", spec.parent.name)

    assert done.returncode == 0, done.stderr
    assert "have ended" in done.stderr


def end_and_leave(head: LocalHead, run: str, remaining: list[RemainingProcess]) -> int:
    """End a run in the journal of its controller alone, as where its node could not be reached; return its worker."""
    worker, controller = worker_of(head, run), controller_pid(head, run)
    os.kill(controller, signal.SIGKILL)
    wait_for(lambda: not alive(controller), what="the end of the controller")
    writer = RunDirWriter(RunDir(run_dir(head, run)))
    writer.append(controller_events.RunEnded(state="lost", exit_code=102, remaining=remaining), time.time())
    writer.close()
    return worker


LEFT = [outcome.build_remaining_process("localhost", None, outcome.NODE_LOST)]


@pytest.mark.parametrize(
    ("command", "known"),
    [
        pytest.param(("down",), LEFT, id="the only runs"),
        pytest.param(("down", "--all"), LEFT, id="all"),
        pytest.param(("down", "--orphans"), LEFT, id="the nodes of a file"),
        pytest.param(("down", "--orphans"), [], id="the nodes of a file, and only its node knows"),
    ],
)
def test_what_an_ended_run_has_left_alive_is_shown_and_ended(
    head: LocalHead, command: tuple[str, ...], known: list[RemainingProcess]
) -> None:
    head.write_local(FOREVER)
    run = head.start()
    worker = end_and_leave(head, run, known)
    listed = head.json("ps")
    table = head.run("ps")

    done = head.run(*command)

    assert [(entry["run"], entry["remaining"]) for entry in listed] == ([(run, known)] if known else [])
    assert ("may still run on localhost" in table.stdout) is bool(known)
    assert (f"`clusterctl down {run}`" in table.stderr) is bool(known)
    assert done.returncode == 0, done.stderr
    assert f"{run}: lost; all processes" in done.stderr
    assert not alive(worker)
    assert head.json("ps") == []


def test_down_without_a_name_ends_the_active_run_and_what_others_have_left(head: LocalHead) -> None:
    head.write_local(FOREVER)
    ended, unreadable = head.start(), head.start()
    left = [end_and_leave(head, run, LEFT) for run in (ended, unreadable)]
    (run_dir(head, unreadable) / "spec.json").write_text("{")
    active = head.start()
    worker = worker_of(head, active)

    done = head.run("down")

    assert not alive(worker)
    assert not alive(left[0])
    assert f"{ended}: lost; all processes" in done.stderr
    assert done.returncode == 7, done.stderr
    assert f"error: the nodes of {unreadable} are unknown, so its processes cannot be ended" in done.stderr
    assert head.run("down", "--orphans").returncode == 0
    assert not alive(left[1])
