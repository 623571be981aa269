"""A supervisor that goes on where files of the run are gone or empty, or where the machine was started anew."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.protocol.command_messages import Command
from tests.agent.conftest import Node, gone
from tests.agent.talk import Refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent.talk import Talk

LOST = [
    pytest.param(["prepare.json"], id="prepare"),
    pytest.param(["prepare.json", "attempt-0/start.json"], id="prepare and start"),
    pytest.param(["prepare.json", "attempt-0/start.json", "attempt-0/rank-0.spawn"], id="all but the journal"),
]


def lose(node: Node, talk: Talk, names: list[str], how: str) -> None:
    """Kill who could write the files anew, and lose them."""
    talk.wait_for("started")
    talk.kill()
    os.kill(node.supervisor(), signal.SIGKILL)
    for name in names:
        if how == "gone":
            (node.folder / name).unlink()
        else:
            (node.folder / name).write_bytes(b"")


@pytest.mark.parametrize("how", ["gone", "empty"])
@pytest.mark.parametrize("names", LOST)
def test_a_stop_ends_a_run_whose_files_are_lost(node: Node, names: list[str], how: str) -> None:
    talk = node.launch(["sleep", "1000"])
    lose(node, talk, names, how)
    again = node.talk(epoch=2)
    node.stop(again, grace=0.5)
    node.follow(again)
    again.wait_for("swept")
    assert gone(talk.of("started")[0]["pid"])
    again.ask(Command.FINISH, **node.where, state="cancelled", exit_code=103)
    again.wait_for("finished")


@pytest.mark.parametrize("names", LOST)
def test_a_finish_of_a_run_whose_files_are_lost_is_refused_while_it_lives(node: Node, names: list[str]) -> None:
    talk = node.launch(["sleep", "1000"])
    lose(node, talk, names, "gone")
    again = node.talk(epoch=2)
    with pytest.raises(Refused, match="attempt 0 .* has not ended"):
        again.ask(Command.FINISH, **node.where, state="cancelled", exit_code=103)
    assert not gone(talk.of("started")[0]["pid"])


@pytest.mark.parametrize("names", LOST)
def test_a_run_goes_on_whose_files_are_lost(node: Node, names: list[str]) -> None:
    gate = node.home / "gate"
    talk = node.launch(["/bin/sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.02; done; exit 5"])
    lose(node, talk, names, "gone")
    again = node.talk(epoch=2)
    node.follow(again)
    again.wait_for("adopted")
    assert not again.of("exited")
    gate.touch()
    again.wait_for("swept")
    assert again.exits()[0]["exit_code"] == 5


def test_nothing_more_is_started_in_an_attempt_whose_preparation_is_lost(node: Node) -> None:
    talk = node.launch(["sleep", "1000"])
    lose(node, talk, ["prepare.json"], "gone")
    with pytest.raises(Refused, match="attempt 0 cannot start: this node has lost `.*prepare.json`"):
        node.start(node.talk(epoch=2), ["sleep", "1000"], ["sleep", "1000"])


def test_the_end_of_a_run_that_was_never_prepared_leaves_nothing_in_memory(node: Node) -> None:
    # The controller died before its request to prepare; the next one ends the run.
    talk = node.talk()
    node.stop(talk)
    talk.ask(Command.FINISH, **node.where, state="cancelled", exit_code=103)

    assert node.folder.is_dir()
    assert not (node.folder / "memory").exists()


def test_after_a_reboot_the_attempt_is_closed_once(node: Node) -> None:
    talk = node.launch(["sleep", "1000"])
    talk.wait_for("started")
    talk.kill()
    for pid in (node.supervisor(), node.waiter(), talk.of("started")[0]["pid"]):
        os.kill(pid, signal.SIGKILL)
    # As if all of it had been written before the machine was started anew, early in its life.
    for path in (node.folder / "journal.jsonl", node.folder / "attempt-0/rank-0.spawn"):
        text = path.read_text().replace(proc.read_boot_id(), "another-boot")
        path.write_text(text.replace(f'"start_time": {talk.of("started")[0]["start_time"]}', '"start_time": 1'))
    again = node.talk(epoch=2)
    node.follow(again)
    again.wait_for("swept")
    assert [again.kinds().count(kind) for kind in ("adopted", "exited", "swept")] == [1, 1, 1]
    assert again.exits()[0]["exit_code"] is None
    node.stop(again)
    again.ask(Command.FINISH, **node.where, state="lost", exit_code=105)


def test_a_supervisor_whose_lock_and_socket_were_removed_can_be_asked_and_stays_the_only_one(node: Node) -> None:
    talk = node.launch(["sleep", "1000"])
    talk.wait_for("started")
    first = node.supervisor()
    for name in ("lock", "socket"):
        (node.folder / name).unlink()
    again = node.talk(epoch=2)
    node.stop(again, grace=0.5)
    node.follow(again)
    again.wait_for("swept")
    again.eventually(lambda: gone(first) or node.supervisor() == first)


def test_a_supervisor_is_asked_however_long_the_path_of_its_run_is(tmp_path: Path) -> None:
    home = tmp_path / ("x" * 150)
    home.mkdir()
    node = Node(home)
    try:
        talk = node.launch(["sleep", "1000"])
        talk.wait_for("started")
        node.stop(talk, grace=0.5)
        talk.wait_for("swept")
    finally:
        node.end()
