"""A mount that hangs takes neither the supervisor nor `serve` with it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.protocol.command_messages import Command
from tests.agent.conftest import gone
from tests.agent.hung import Hung, mounted
from tests.agent.talk import Refused
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")

SOON = 5.0


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Hung]:
    with mounted(tmp_path / "hung") as made:
        yield made


def answers(talk: Talk) -> None:
    """A beat comes back."""
    number = len(talk.beats) + 1
    talk.beat(number)
    talk.until(lambda: len(talk.beats) >= number, SOON)


def test_watched_files_that_hang_keep_no_exit_from_being_told(node: Node, hung: Hung) -> None:
    talk = node.launch(["sleep", "1000"], ["sleep", "1000"], watch=[str(hung.folder / "*")], sample_seconds=0.2)
    talk.eventually(hung.asked)
    os.kill(talk.of("started")[0]["pid"], signal.SIGKILL)
    talk.wait_for("exited", 2, SOON)
    talk.wait_for("swept", seconds=SOON)


def test_ranks_are_sampled_although_the_files_that_are_watched_hang(node: Node, hung: Hung) -> None:
    talk = node.launch(["sleep", "1000"], watch=[str(hung.folder / "*")], sample_seconds=0.2)
    talk.eventually(hung.asked)
    talk.until(lambda: bytes(talk.files.get("samples.jsonl", b"")).count(b'"watched":null') >= 2)


def test_a_supervisor_takes_over_although_the_interpreter_hangs_by_now(node: Node, hung: Hung) -> None:
    python = node.home / "python"
    python.symlink_to(sys.executable)
    talk = node.launch(["sleep", "1000"], python=str(python))
    worker = talk.wait_for("started")[0]["pid"]
    python.unlink()
    python.symlink_to(hung.folder / "x")
    os.kill(node.supervisor(), signal.SIGKILL)
    talk.wait_for("adopted", seconds=SOON)
    node.stop(talk)
    talk.wait_for("swept", seconds=SOON)
    assert gone(worker)


def test_a_code_folder_that_hangs_is_named_by_the_refusal_to_prepare(node: Node, hung: Hung) -> None:
    talk = node.talk()
    with pytest.raises(Refused, match=f"{hung.folder}/work does not answer"):
        node.prepare(talk, workdir=str(hung.folder / "work"))
    answers(talk)
    # Nothing is left of it that would be in the way.
    node.prepare(talk)


def test_a_code_folder_that_hangs_is_named_by_the_probe_and_holds_up_nobody(node: Node, hung: Hung) -> None:
    talk = node.talk()
    asked = talk.post(Command.PROBE, cwd=str(hung.folder / "work"), python=sys.executable, request={"deadline": 2.0})
    talk.eventually(hung.asked)
    answers(talk)
    with pytest.raises(Refused, match=f"{hung.folder}/work does not answer"):
        talk.answer(asked, 10.0)


def test_a_list_of_runs_that_takes_long_holds_up_nobody(node: Node) -> None:
    talk = node.launch(["sleep", "1000"])
    prepare = node.folder / "prepare.json"
    content = prepare.read_bytes()
    prepare.unlink()
    # Whoever opens this waits for somebody who writes.
    os.mkfifo(prepare)
    asked = talk.post(Command.RUNS)
    answers(talk)
    assert asked not in talk.replies
    prepare.write_bytes(content)
    assert talk.answer(asked)["runs"][0]["live"]
    prepare.unlink()
    prepare.write_bytes(content)


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def test_looks_at_a_run_whose_supervisor_does_not_listen_hold_up_nobody(node: Node) -> None:
    talk = node.launch(["sleep", "1000"])
    supervisor = node.supervisor()
    freeze(supervisor)
    # Each leaves a connection behind, and the kernel keeps as many as the supervisor has asked for.
    for _ in range(70):
        assert talk.ask(Command.STATUS, **node.where)["supervisor"]
    assert node.supervisor() == supervisor
    assert talk.ask(Command.RUNS)["runs"][0]["supervisor"]
    answers(talk)


def test_a_stop_ends_a_run_whose_supervisor_does_not_answer_by_way_of_the_next_one(node: Node) -> None:
    talk = node.launch(["sleep", "1000"])
    frozen = node.supervisor()
    freeze(frozen)
    node.stop(talk)
    swept = talk.wait_for("swept")[0]
    assert (swept["remaining"], gone(frozen)) == ([], True)


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup whose processes act on no signal, not even on SIGKILL, as one that waits for a dead disk."""
    if not (FREEZER / "cgroup.procs").exists():
        pytest.skip("needs the freezer of cgroup version 1")
    folder = FREEZER / f"clusterctl-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    (folder / "freezer.state").write_text("THAWED")
    wait_for(lambda: not (folder / "cgroup.procs").read_text(), what="the cgroup to be empty")
    folder.rmdir()


def test_a_supervisor_that_nothing_can_end_is_named(node: Node, freezer: Path) -> None:
    talk = node.launch(["sleep", "1000"], gpus=[996])
    talk.wait_for("started")
    (freezer / "cgroup.procs").write_text(f"{node.supervisor()}")
    (freezer / "freezer.state").write_text("FROZEN")
    finish = talk.post(Command.FINISH, **node.where, state="cancelled", exit_code=103)
    node.stop(talk)
    with pytest.raises(Refused, match=f"the supervisor of run {node.run} is stuck in the kernel"):
        talk.answer(finish)
