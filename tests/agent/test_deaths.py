"""Supervisors, waiters and sessions are killed at will: workers go on, and what became of them is known."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.protocol.command_messages import Command
from tests.agent.conftest import gone

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

GATE = "while [ ! -e {gate} ]; do sleep 0.02; done; echo after; exit 5"


def gated(node: Node) -> tuple[Talk, Path]:
    gate = node.home / "gate"
    talk = node.launch(["/bin/sh", "-c", "echo before;" + GATE.format(gate=gate)])
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log") == b"before\n")
    return talk, gate


def test_a_killed_supervisor_is_replaced_and_the_exit_code_still_arrives(node: Node) -> None:
    talk, gate = gated(node)
    os.kill(node.supervisor(), signal.SIGKILL)
    adopted = talk.wait_for("adopted")[0]
    gate.touch()
    talk.wait_for("swept")
    assert adopted["attempt"] == 0
    assert talk.exits()[0]["exit_code"] == 5
    talk.until(lambda: talk.files["attempt-0/rank-0.log"] == b"before\nafter\n")
    assert [event["seq"] for event in talk.events] == list(range(1, len(talk.events) + 1))


def test_a_worker_that_ends_while_nobody_watches_is_known_later(node: Node) -> None:
    talk, gate = gated(node)
    worker, waiter = talk.of("started")[0]["pid"], node.waiter()
    talk.kill()
    os.kill(node.supervisor(), signal.SIGKILL)
    gate.touch()
    again = node.talk()
    again.eventually(lambda: gone(worker) and gone(waiter))
    node.follow(again)
    again.wait_for("swept")
    assert again.exits()[0]["exit_code"] == 5


def test_a_killed_waiter_costs_nothing_while_the_supervisor_lives(node: Node) -> None:
    talk, gate = gated(node)
    os.kill(node.waiter(), signal.SIGKILL)
    gate.touch()
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == 5


def test_with_waiter_and_supervisor_killed_the_exit_is_unknown(node: Node) -> None:
    talk, gate = gated(node)
    os.kill(node.supervisor(), signal.SIGKILL)
    os.kill(node.waiter(), signal.SIGKILL)
    talk.wait_for("adopted")
    gate.touch()
    talk.wait_for("swept")
    end = talk.exits()[0]
    assert (end["exit_code"], end["signal"], end["stopped"]) == (None, None, False)


def test_a_stop_works_with_supervisor_and_waiter_dead(node: Node) -> None:
    talk, _ = gated(node)
    talk.kill()
    os.kill(node.supervisor(), signal.SIGKILL)
    os.kill(node.waiter(), signal.SIGKILL)
    again = node.talk(epoch=2)
    node.stop(again)
    node.follow(again)
    again.wait_for("swept")
    assert gone(talk.of("started")[0]["pid"])


def test_a_supervisor_killed_amid_a_stop_finishes_it(node: Node) -> None:
    talk = node.launch(["/bin/sh", "-c", "trap '' TERM; echo on; while :; do sleep 0.05; done"])
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log") == b"on\n")
    node.stop(talk, grace=1.0)
    talk.wait_for("stopping")
    os.kill(node.supervisor(), signal.SIGKILL)
    talk.wait_for("swept")
    assert talk.exits()[0]["signal"] == signal.SIGKILL
    assert talk.exits()[0]["stopped"]


def test_a_supervisor_killed_again_and_again_loses_nothing(node: Node) -> None:
    talk, gate = gated(node)
    for count in range(1, 4):
        os.kill(node.supervisor(), signal.SIGKILL)
        talk.wait_for("adopted", count)
    gate.touch()
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == 5


def test_a_lost_session_harms_nothing(node: Node) -> None:
    talk, gate = gated(node)
    talk.kill()
    again = node.talk(epoch=2)
    node.follow(again, seq=talk.events[-1]["seq"], cursors={"attempt-0/rank-0.log": 7})
    gate.touch()
    again.wait_for("swept")
    again.until(lambda: again.files.get("attempt-0/rank-0.log") == b"after\n")
    assert again.exits()[0]["exit_code"] == 5


def test_a_session_ends_after_silence_and_the_run_does_not(node: Node) -> None:
    talk = node.launch(["sleep", "1000"], talk=node.talk(idle=1.0))
    talk.eventually(lambda: talk.closed)
    again = node.talk()
    assert again.ask(Command.STATUS, **node.where)["workers"][0]["alive"]


@pytest.mark.parametrize("guard", ["supervisor", "waiter"])
def test_without_a_controller_the_fence_ends_the_run(node: Node, guard: str) -> None:
    talk = node.launch(["/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"], stop_after=2.0, grace=0.3)
    worker = talk.of("started")[0]["pid"] if talk.of("started") else talk.wait_for("started")[0]["pid"]
    supervisor = node.supervisor()
    talk.kill()
    if guard == "waiter":
        os.kill(supervisor, signal.SIGKILL)
    again = node.talk(epoch=None)
    again.eventually(lambda: gone(worker), 15)
    late = node.talk(epoch=2)
    node.follow(late)
    late.wait_for("swept")
    assert [event["reason"] for event in late.of("stopping")] == ["fence"]
    assert late.exits()[0]["stopped"]


def test_a_supervisor_keeps_the_fence_although_the_file_that_tells_of_the_controller_was_removed(node: Node) -> None:
    talk = node.launch(["sleep", "1000"], stop_after=2.0, grace=0.3)
    worker = talk.wait_for("started")[0]["pid"]
    os.kill(node.waiter(0), signal.SIGKILL)
    talk.kill()
    (node.folder / "lease").unlink()
    again = node.talk(epoch=None)
    again.eventually(lambda: gone(worker), 15)


def test_a_worker_that_the_fence_of_another_ended_was_stopped(node: Node) -> None:
    talk = node.launch(["sleep", "1000"], ["sleep", "1000"], stop_after=2.0, grace=0.3)
    talk.until(lambda: len(talk.of("started")) == 2)
    workers = [event["pid"] for event in talk.of("started")]
    talk.kill()
    for guardian in (node.supervisor(), node.waiter(0)):
        os.kill(guardian, signal.SIGKILL)
    again = node.talk(epoch=None)
    again.eventually(lambda: all(gone(pid) for pid in workers), 15)
    late = node.talk(epoch=2)
    node.follow(late)
    late.wait_for("swept")
    assert [late.exits()[rank]["stopped"] for rank in (0, 1)] == [True, True]


def test_beats_of_a_controller_hold_the_fence_back(node: Node) -> None:
    talk = node.launch(["/bin/sh", "-c", "sleep 4; exit 9"], stop_after=1.5)
    number = 0
    while not talk.of("swept"):
        number += 1
        talk.beat(number)
        talk.read(0.3)
    assert talk.exits()[0]["exit_code"] == 9


def test_what_was_prepared_and_never_started_is_undone_at_once(node: Node) -> None:
    talk = node.talk()
    node.prepare(talk)
    node.follow(talk)
    supervisor = node.supervisor()
    talk.ask(Command.FINISH, **node.where, state="failed", exit_code=4)
    talk.wait_for("finished")
    talk.eventually(lambda: gone(supervisor))


def test_a_line_that_was_torn_by_the_death_of_the_supervisor_silences_nobody(node: Node) -> None:
    talk = node.launch(["/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; exit 7"])
    talk.wait_for("started")
    first = node.supervisor()
    os.kill(first, signal.SIGSTOP)
    with (node.folder / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"seq":3,"wall":1.0,"mono":1.0,"boot":"b","kind":"exited","tail":"' + b"x" * 4000)
    for number in (1, 2):  # by then the session has read it
        talk.beat(number)
        talk.until(lambda number=number: len(talk.beats) == number)
    os.kill(first, signal.SIGKILL)

    talk.wait_for("adopted")
    (node.home / "work/go").touch()
    talk.wait_for("swept")

    assert [event["seq"] for event in talk.events] == list(range(1, len(talk.events) + 1))
    assert talk.exits()[0]["exit_code"] == 7
