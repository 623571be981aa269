"""Imports that begin before a node is prepared: they are used where all is as it was, and leave nothing behind."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent import inject
from clusterctl.agent.linux.loop import Loop, Timer
from clusterctl.agent.linux.spawn import Program
from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.protocol.requests import Forked
from clusterctl.agent.supervisor.forking.zygote import Stage, Zygote
from tests.agent.started import Job, Ran
from tests.agent.test_start_methods import installed, path_of
from tests.agent.test_zygote import zygotes
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

COUNTED = "import os\nos.write(os.open('imported', os.O_CREAT | os.O_WRONLY | os.O_APPEND), b'once ')\n"
SLOW = COUNTED + "import time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\n"


class Impatient(Loop):
    """A loop in which long times are over when the test says so."""

    def __init__(self) -> None:
        super().__init__(traceback.print_exc)
        self.long: list[Callable[[], None]] = []

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        if seconds < 60:
            return super().after(seconds, action)
        self.long.append(action)
        return Timer(action)


def job_of(node: Node, special: str = COUNTED, *, named: bool = True) -> Job:
    installed(node, "special", special)
    job = Job(node, "fork", "train.py", env=path_of(node), preload=["special"] if named else None)
    job.write("train.py", "import special\nprint('ran')\n")
    return job


def begin_early(job: Job, talk: Talk, **more: Any) -> None:
    where = {**job.node.where, "workdir": str(job.work)}
    talk.ask(Command.IMPORT, **where, attempt=0, forked={**job.forked, **more}, python=job.python)


def run(job: Job, talk: Talk) -> Ran:
    job.prepare(talk)
    job.node.follow(talk)
    job.begin(talk)
    talk.wait_for("swept")
    ran = Ran(talk, job.node.folder)
    assert ran.code() == 0
    return ran


def imported(job: Job) -> int:
    return len((job.work / "imported").read_text().split())


@pytest.mark.parametrize("named", [True, False])
def test_what_was_imported_early_is_imported_once(node: Node, named: bool) -> None:
    job, talk = job_of(node, named=named), node.talk()
    begin_early(job, talk)
    wait_for(lambda: (job.work / "imported").exists() and zygotes(node), what="the imports")
    ran = run(job, talk)
    assert (ran.forked, ran.said(), imported(job)) == (True, "ran\n", 1)


def test_a_start_waits_for_imports_that_began_early(node: Node) -> None:
    job, talk = job_of(node, SLOW), node.talk()
    begin_early(job, talk)
    wait_for((job.work / "imported").exists, what="the imports")
    job.prepare(talk)
    node.follow(talk)
    workers = [{"rank": 0, "local_rank": 0, "argv": job.argv, "env": {**job.env, "RANK": "0"}}]
    number = talk.post(Command.START, **node.where, attempt=0, workers=workers, inject=False)
    (job.work / "go").touch()
    talk.answer(number)
    talk.wait_for("swept")
    assert (Ran(talk, node.folder).forked, imported(job)) == (True, 1)


def test_a_script_that_came_after_the_imports_decides(node: Node) -> None:
    installed(node, "other", "")
    job, talk = job_of(node, named=False), node.talk()
    begin_early(job, talk)
    wait_for(lambda: (job.work / "imported").exists() and zygotes(node), what="the imports")
    early = zygotes(node)
    job.write("train.py", "import other, sys\nprint('special' in sys.modules)\n")
    ran = run(job, talk)
    assert (ran.forked, ran.said()) == (True, "False\n")
    assert not set(early) & set(zygotes(node))


def test_a_module_that_came_after_the_imports_decides(node: Node) -> None:
    job, talk = job_of(node), node.talk()
    begin_early(job, talk)
    wait_for(lambda: (job.work / "imported").exists() and zygotes(node), what="the imports")
    installed(node, "special", COUNTED + "# newer\n")
    assert run(job, talk).forked
    assert imported(job) == 2


def test_another_environment_has_it_imported_again(node: Node) -> None:
    job, talk = job_of(node), node.talk()
    begin_early(job, talk, env={**job.env, "KIND": "other"})
    wait_for((job.work / "imported").exists, what="the imports")
    assert run(job, talk).forked
    assert imported(job) == 2


@pytest.mark.parametrize("what", ["the folder", "the script", "a module"])
def test_what_is_still_to_come_is_waited_for_in_silence(node: Node, what: str) -> None:
    job, talk = job_of(node), node.talk()
    script, folder = job.work / "train.py", node.home / "site-packages"
    aside = {"the folder": job.work, "the script": script, "a module": folder}[what]
    aside.rename(node.home / "aside")
    begin_early(job, talk)
    wait_for(lambda: not zygotes(node), what="the end of a zygote that can do nothing")
    (node.home / "aside").rename(aside)
    ran = run(job, talk)
    assert (ran.forked, len(talk.of("alarm"))) == (True, 1)


def test_what_could_not_be_imported_early_is_tried_again_where_that_is_heard_only_after_the_node_is_prepared(
    node: Node,
) -> None:
    job, talk = job_of(node, SLOW + "raise ImportError('half of it is here')\n"), node.talk()
    begin_early(job, talk)
    wait_for((job.work / "imported").exists, what="the imports")
    installed(node, "special", COUNTED)
    job.prepare(talk)
    (job.work / "go").touch()
    node.follow(talk)
    job.begin(talk)
    talk.wait_for("swept")
    assert (Ran(talk, node.folder).forked, imported(job)) == (True, 2)


def test_a_start_of_which_nothing_comes_leaves_nothing(node: Node) -> None:
    job, talk = job_of(node, SLOW), node.talk()
    begin_early(job, talk)
    wait_for((job.work / "imported").exists, what="the imports")
    talk.ask(Command.FINISH, **node.where, state="failed", exit_code=5)
    wait_for(lambda: not zygotes(node) and not node.supervised(), what="the end of supervisor and zygote")
    assert not os.path.exists(node.folder / "journal.jsonl") or not (node.folder / "journal.jsonl").read_text()


def test_a_head_that_leaves_leaves_nothing(node: Node) -> None:
    job, talk = job_of(node, SLOW), node.talk()
    begin_early(job, talk)
    wait_for((job.work / "imported").exists, what="the imports")
    talk.kill()
    wait_for(lambda: not zygotes(node) and not node.supervised(), what="the end of supervisor and zygote")


def test_where_ranks_start_anew_nothing_is_imported(node: Node) -> None:
    job, talk = job_of(node), node.talk()
    talk.ask(Command.IMPORT, **node.where, attempt=0, workdir=str(job.work), python=job.python)
    assert not zygotes(node)
    assert not run(Job(node, "spawn", "train.py", env=path_of(node)), talk).forked


def test_a_run_that_was_prepared_imports_nothing_early(node: Node) -> None:
    job, talk = job_of(node), node.talk()
    run(job, talk)
    before = imported(job)
    begin_early(job, talk)
    talk.ask(Command.STATUS, **node.where)
    assert imported(job) == before


def test_imports_that_take_too_long_are_not_begun_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    python, env = sys.executable.encode(), {b"PATH": b"/bin"}
    loop, asked = Impatient(), Forked(argv=[sys.executable, "train.py"], env={}, preload=["decimal"])
    program = Program([python, b"train.py"], env, str(tmp_path).encode())
    zygote = Zygote(loop, asked, program, inject.install(str(tmp_path / "inject")), "a0b1c2", lambda: None)
    zygote.check(asked, program, "a0b1c2")
    loop.long[-1]()
    assert (zygote.stage, zygote.stale) == (Stage.OVER, False)
    assert zygote.why == "the imports took longer than 120 s"


OPTIONAL = "try:\n    import helper\nexcept ImportError:\n    helper = None\n"


@pytest.mark.parametrize("before", [True, False], ids=["in its place", "not there before"])
@pytest.mark.parametrize("named", [True, False])
def test_a_file_of_the_users_that_came_after_the_imports_and_that_they_would_have_taken_decides(
    node: Node, named: bool, before: bool
) -> None:
    if before:
        installed(node, "helper", "WHO = 'installed'\n")
    job, talk = job_of(node, OPTIONAL + COUNTED, named=named), node.talk()
    job.write("train.py", "import special\nprint(special.helper.WHO)\n")
    begin_early(job, talk)
    wait_for(lambda: (job.work / "imported").exists() and zygotes(node), what="the imports")
    job.write("helper.py", "WHO = 'own'\n")
    job.prepare(talk)
    job.node.follow(talk)
    job.begin(talk)
    talk.wait_for("swept")
    ran = Ran(talk, job.node.folder)
    assert (ran.forked, ran.said()) == (False, "own\n")


@pytest.mark.parametrize("module", ["struct", "json", "time", "fcntl"])
def test_a_file_of_the_users_is_no_part_of_a_zygote_whatever_it_is_called(node: Node, module: str) -> None:
    job, talk = job_of(node), node.talk()
    job.write(f"{module}.py", "open('run-in-the-zygote', 'w').close()\nraise RuntimeError\n")
    begin_early(job, talk)
    wait_for(lambda: (job.work / "imported").exists() and zygotes(node), what="the imports")
    assert not (job.work / "run-in-the-zygote").exists()
