"""What a controller makes of nodes that vanish, return, lose their files or their machine, and of one that was before it."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from clusterctl.agent.facts.claim_files import collect_claims
from clusterctl.agent.linux import proc
from clusterctl.config.spec import HostSpec, NetworkSpec, TransportKind
from clusterctl.errors import ConnectError
from clusterctl.run.controller import replication
from clusterctl.run.nodes.preflight import Preflight
from clusterctl.run.record import rundir
from clusterctl.run.record.disk_files import remove_torn_line
from clusterctl.run.rules.state import RunState, WorkerPhase
from clusterctl.session.connect import open_session
from clusterctl.transport.local import LocalTransport
from tests.agent.conftest import gone
from tests.agent.controlling import Run, Wire, run_on
from tests.lab.waiting import wait_for

UNTIL_GO = 'while ! test -e "$GO"; do sleep 0.05; done'
MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Makes one run; its workers end well once `go` is there, in the folder of the test."""
    made: list[Any] = []

    def make(command: str = UNTIL_GO, *names: str, **more: Any) -> Run:
        env = {"GO": str(tmp_path / "go")}
        made.append(run_on(tmp_path, command, names or ("a", "b"), env=env, **more))
        return made[-1].__enter__()

    yield make
    for context in made:
        context.__exit__(None, None, None)


def go(tmp_path: Path) -> None:
    (tmp_path / "go").touch()


def all_running(state: RunState) -> bool:
    return bool(state.workers) and all(w.phase is WorkerPhase.RUNNING for w in state.workers.values())


def unreachable(_dialed: int) -> None:
    raise ConnectError("it", "no route to host")


def pid_of(run: Run, rank: int) -> int:
    pid = run.state.workers[rank].pid
    assert pid is not None
    return pid


def spawned(run: Run, node: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.on(node) / f"attempt-0/rank-{rank}.spawn").read_text())
    return found


# --- a controller after another

SIZE = 200_000_000
MUCH_OUTPUT = f"head -c {SIZE} /dev/zero"


def replica_of(run: Run, node: str, rank: int) -> Path:
    return run.dir.node(node) / f"attempt-0/rank-{rank}.log"


def die_with_half_of_the_output(run: Run) -> None:
    """Kill the controller of a run all of whose ranks have ended, while it fetches what they have written."""
    run.start_process()
    run.reaches(lambda s: s.workers and all(w.pid for w in s.workers.values()), what="both workers")
    journals = [run.on(node) / "journal.jsonl" for node in ("a", "b")]
    # Else a fast one has fetched all of it by the time it hears that a rank has ended.
    run.pause_controller(lambda: all(b'"swept"' in journal.read_bytes() for journal in journals), "all to be swept")
    run.reaches(lambda s: s.nodes and all(n.swept for n in s.nodes.values()), what="all to be known as swept")
    run.kill_controller()
    sizes = [replica_of(run, node, rank).stat().st_size for rank, node in enumerate(("a", "b"))]
    assert max(sizes) < SIZE, "the controller was too fast for this test"


def test_an_adopter_waits_for_its_nodes_before_it_decides_and_brings_every_byte(make_run: MakeRun) -> None:
    run = make_run(MUCH_OUTPUT)
    die_with_half_of_the_output(run)

    run.adopt()

    assert run.ended(60) == 0
    for rank, node in enumerate(("a", "b")):
        assert replica_of(run, node, rank).stat().st_size == SIZE
        assert '"finished"' in (run.on(node) / "journal.jsonl").read_text()


def test_an_adopter_closes_no_run_before_a_node_with_the_rest_of_its_output_has_come_back(make_run: MakeRun) -> None:
    run = make_run(MUCH_OUTPUT)
    die_with_half_of_the_output(run)

    dialed, back = list[int](), threading.Event()

    def away(count: int) -> None:
        dialed.append(count)
        if not back.is_set():
            raise ConnectError("b", "no route")

    run.nodes.before["b"] = away
    run.adopt()
    wait_for(lambda: replica_of(run, "a", 0).stat().st_size == SIZE, what="the output of the node that is there")
    before = len(dialed)
    # Between two of them lies a second at least, in which the controller looks what is left to do.
    wait_for(lambda: run.state.is_over or len(dialed) >= before + 2, what="the other node to be dialed again and again")
    assert not run.state.is_over
    back.set()

    assert run.ended(60) == 0
    assert replica_of(run, "b", 1).stat().st_size == SIZE


def test_a_run_whose_output_is_not_whole_because_a_node_stays_away_says_so_and_leaves_it_there(
    make_run: MakeRun,
) -> None:
    run = make_run(MUCH_OUTPUT, network=NetworkSpec(node_lost_after=5.0))
    die_with_half_of_the_output(run)

    def away(_: int) -> None:
        raise ConnectError("b", "no route")

    run.nodes.before["b"] = away
    run.adopt()

    assert run.ended(60) == 0
    assert (
        "b did not report the sizes of the output: the copy on this head may be incomplete"
        in run.dir.events.read_text()
    )
    assert replica_of(run, "a", 0).stat().st_size == SIZE > replica_of(run, "b", 1).stat().st_size
    assert '"finished"' not in (run.on("b") / "journal.jsonl").read_text()


def test_a_link_that_breaks_while_a_run_is_taken_over_does_not_look_like_another_controller(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run()
    run.start_process()
    run.reaches(all_running)
    run.kill_controller()

    def slow(_: int) -> None:
        wait_for(lambda: run.nodes.opened["a"], what="the first node")
        run.nodes.cut("a")
        # Time enough to dial it again, where somebody does that before all have been reached.
        for _ in range(20):
            if len(run.nodes.opened["a"]) > 1:
                break
            threading.Event().wait(0.1)

    run.nodes.before["b"] = slow
    run.adopt()
    run.reaches(
        lambda s: len(run.nodes.opened["a"]) > 1 and s.nodes["a"].link == "connected", what="the first node again"
    )
    go(tmp_path)

    assert run.ended() == 0
    assert "another controller" not in run.dir.events.read_text()


def test_nodes_that_are_there_do_not_wait_for_ever_for_one_that_is_not_and_it_is_ended_when_it_comes(
    make_run: MakeRun,
) -> None:
    run = make_run()
    run.start_process()
    run.reaches(all_running)
    run.kill_controller()
    workers, answers = [pid_of(run, rank) for rank in (0, 1)], threading.Event()
    run.nodes.before["b"] = lambda _: answers.wait(60)

    run.adopt(cancel=True)
    wait_for(lambda: gone(workers[0]), 40.0, what="the worker of the node that is there")
    assert not gone(workers[1])
    answers.set()

    assert run.ended() == 103
    assert gone(workers[1])
    assert (run.state.phase.value, run.state.remaining) == ("cancelled", ())


def test_an_attempt_whose_controller_died_before_it_had_started_all_workers_is_ended(make_run: MakeRun) -> None:
    run = make_run()
    run.start_process("b:start")
    state = run.reaches(lambda s: s.workers and s.workers[0].phase is WorkerPhase.RUNNING)
    assert state.workers[1].phase is WorkerPhase.PENDING
    run.kill_controller()

    run.adopt()

    assert run.ended() == 100
    state = run.state
    assert (state.reason, state.workers[0].stopped, state.remaining) == ("start_failed", True, ())
    assert state.error is not None
    assert "before it had started the workers on b" in state.error["message"]


def test_an_adopter_believes_its_nodes_where_the_head_lost_the_begin_of_the_attempt(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run()
    run.start_process()
    before = run.reaches(all_running)
    run.kill_controller()
    lines = run.dir.events.read_bytes().splitlines(keepends=True)
    run.dir.events.write_bytes(b"".join(line for line in lines if b'"kind":"attempt"' not in line))
    remove_torn_line(run.dir.events)
    assert run.state.attempt == -1

    run.adopt()
    after = run.reaches(all_running)

    assert {r: w.pid for r, w in after.workers.items()} == {r: w.pid for r, w in before.workers.items()}
    assert (after.world_size, after.master_port) == (before.world_size, before.master_port)
    go(tmp_path)
    assert run.ended() == 0


# --- nodes that come back as others than they were


def test_a_node_that_comes_back_without_a_trace_of_the_run_is_lost_and_nothing_is_left_on_it(make_run: MakeRun) -> None:
    run = make_run()
    run.start()
    run.reaches(all_running)
    supervisor = proc.read_stat(spawned(run, "b", 1)["waiter_pid"])
    assert supervisor is not None
    for pid in (supervisor.ppid, supervisor.pid, pid_of(run, 1)):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(run.on("b").parent / "b")
    run.nodes.cut("b")

    assert run.ended() == 105

    assert run.state.cause is not None
    assert run.state.cause.message == "node lost: it has lost the files of the run"
    assert run.state.remaining == ()


def test_nodes_that_are_lost_together_are_given_up_together(make_run: MakeRun) -> None:
    lost = ("b", "c", "d", "e", "f")
    run = make_run(UNTIL_GO, "a", *lost, network=NetworkSpec(node_lost_after=3.0))
    run.start()
    run.reaches(all_running)
    for node in lost:
        run.nodes.before[node] = unreachable
        run.nodes.cut(node)

    assert run.ended() == 105

    said = [json.loads(line) for line in run.dir.events.read_text().splitlines()]
    given_up = {line["node"]: line["time"] for line in said if line["kind"] == "link" and line["link"] == "lost"}
    assert sorted(given_up) == sorted(lost)
    # One at each look were a second: it looks four times in one.
    assert max(given_up.values()) - min(given_up.values()) < 0.8


def test_workers_of_a_node_that_lost_its_files_alone_are_ended_all_the_same(make_run: MakeRun) -> None:
    run = make_run()
    run.start()
    run.reaches(all_running)
    worker = pid_of(run, 1)
    shutil.rmtree(run.on("b"))
    run.nodes.cut("b")

    assert run.ended() == 105

    assert gone(worker)
    assert run.state.remaining == ()


def test_a_node_that_cannot_be_followed_is_dialed_again(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    run.start()
    run.reaches(all_running)
    epoch, aside = run.on("b") / "epoch", run.on("b") / "aside"
    epoch.rename(aside)
    epoch.mkdir()
    run.nodes.cut("b")
    run.reaches(lambda s: "irectory" in s.nodes["b"].link_why, what="a second connection that is of no use")
    epoch.rmdir()
    aside.rename(epoch)

    run.reaches(lambda s: s.nodes["b"].link == "connected" and len(run.nodes.opened["b"]) > 2, what="one that is")
    go(tmp_path)
    assert run.ended() == 0


def test_a_machine_that_was_rebooted_is_told_from_one_whose_link_broke(make_run: MakeRun) -> None:
    run = make_run()
    run.start()
    run.reaches(all_running)
    now = proc.read_boot_id()
    run.nodes.wires["b"] = {"replace": (now.encode(), now[::-1].encode())}
    run.nodes.cut("b")

    assert run.ended() == 105

    assert run.state.cause is not None
    assert run.state.cause.message == "node lost: it was rebooted"
    said = [json.loads(line)["kind"] for line in (run.on("b") / "journal.jsonl").read_text().splitlines()]
    assert said[-1] == "finished", "its supervisor is left"


def test_a_node_that_answers_and_never_says_that_all_has_ended_is_named_in_time(make_run: MakeRun) -> None:
    run = make_run()
    run.nodes.wires["b"] = {"replace": (b'"kind":"swept"', b'"kind":"slept"')}
    run.start()
    state = run.reaches(all_running)
    began = time.monotonic()

    run.cancel(kill=True)

    assert run.ended(60) == 103
    assert time.monotonic() - began < 45.0
    (left,) = run.state.remaining
    assert (left["node"], left["why"]) == ("b", "its node has not reported its end")
    assert gone(state.workers[0].pid or 0)


# --- nodes that vanish while the run begins


def slowly(tmp_path: Path) -> dict[str, str]:
    """A prologue that the checks run too, and that takes them so long that something can happen meanwhile."""
    return {"prologue": f"touch {tmp_path}/checking; sleep 2"}


def test_a_spare_that_answers_only_while_the_others_are_checked_is_left_out_until_it_is_needed(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run("true", "a", spares=("s",), job=slowly(tmp_path))

    def unreachable_at_first(count: int) -> None:
        if count == 0:
            raise ConnectError("s", "no route")
        wait_for((tmp_path / "checking").exists, what="the checks")

    run.nodes.before["s"] = unreachable_at_first
    run.start(Preflight(run.dir, run.spec, strict=False))

    assert run.ended() == 0, run.state.error
    assert len(run.nodes.opened["s"]) == 1


def test_a_node_that_is_lost_while_it_is_checked_ends_the_start_by_its_name(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("true", job=slowly(tmp_path))
    run.start(Preflight(run.dir, run.spec, strict=False))
    wait_for((tmp_path / "checking").exists, what="the checks")
    run.nodes.cut("b")

    assert run.ended() == 4

    assert run.state.error is not None
    assert (run.state.error["node"], run.state.error["message"]) == ("b", "the connection was lost")
    assert run.state.attempt == -1


class _SickNode(Preflight):
    """Checks that find node b unfit."""

    @override
    def __call__(self, sessions: object, post: object) -> dict[str, str]:
        return {"b": "its disk is full"}

    @override
    def check_code(self, sessions: object) -> None:
        pass


def test_a_run_that_waited_for_gpus_gives_back_those_of_a_node_that_is_unfit(make_run: MakeRun) -> None:
    run = make_run(UNTIL_GO, min_nodes=1)
    gpus = 960 + 2 * (os.getpid() % 100)  # Of no other test that runs now.
    run.spec = replace(run.spec, hosts=tuple(replace(h, gpus=(gpus + i,)) for i, h in enumerate(run.spec.hosts)))

    run.start(_SickNode(run.dir, run.spec, strict=False), max_wait_s=60.0)
    run.reaches(all_running, what="the worker of node a")

    assert [claim["node"] for claim in collect_claims()["claims"] if claim["run"] == run.dir.run] == ["a"]


# --- far away


def test_all_files_of_a_far_node_are_compared_in_one_round_trip(tmp_path: Path) -> None:
    delay, files = 0.4, [f"attempt-{attempt}/rank-{rank}.log" for attempt in range(10) for rank in range(4)]
    run, node = rundir.create_run_dir("far", tmp_path / "head"), tmp_path / "clusterctl" / "nodes"
    for place in (run.node("n"), node / run.run / "n"):
        for file in files:
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_text(f"what {file} says")
    (run.node("n") / files[-1]).write_text("something else.....")
    (run.node("n") / files[0]).write_text("something else.....")
    host = HostSpec(name="n", host="n", transport=TransportKind.LOCAL)
    local = LocalTransport({**os.environ, "XDG_STATE_HOME": str(tmp_path)})

    class Far:
        def open(self, host: HostSpec, **options: Any) -> Wire:
            return Wire(local.open(host, **options), delay=delay)

        def close(self) -> None:
            pass

    session = open_session(Far(), host, queue.SimpleQueue())
    began = time.monotonic()
    growing = replication.find_stale_replicas(run, "n", session, 9, include_earlier_attempts=False)
    every = replication.find_stale_replicas(run, "n", session, 9, include_earlier_attempts=True)
    took = time.monotonic() - began
    session.close()

    assert growing == [files[-1]]
    assert sorted(every) == sorted([files[0], files[-1]])
    assert took < 4 * delay


def test_all_nodes_are_asked_to_tell_their_journal_at_once(make_run: MakeRun, tmp_path: Path) -> None:
    names, delay = ("a", "b", "c", "d", "e", "f"), 0.3
    run = make_run("true", *names)
    for name in names:
        run.nodes.wires[name]["delay"] = delay
    run.start()

    assert run.ended() == 0
    times = {}
    for line in run.dir.events.read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "attempt" or (event["kind"] == "phase" and event["name"] == "start"):
            times.setdefault(event["kind"], event["time"])
    assert times["phase"] - times["attempt"] < len(names) * delay / 2


# --- the start


def test_the_node_of_rank_0_has_started_before_others_are_asked_so_that_it_listens(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run(UNTIL_GO, "a", "b")
    # What the node says is heard so much later.
    run.nodes.wires["a"]["delay"] = delay = 0.3
    run.start()
    run.reaches(all_running, what="all ranks to run")
    go(tmp_path)

    assert run.ended() == 0
    told = {n: [json.loads(line) for line in (run.on(n) / "journal.jsonl").read_text().splitlines()] for n in "ab"}
    started = {n: next(line["wall"] for line in lines if line["kind"] == "started") for n, lines in told.items()}
    assert started["b"] - started["a"] >= delay
